"""The OpenAI-compatible HTTP server behind `zipage serve` (docs/serving.md)."""
