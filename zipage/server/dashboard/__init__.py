"""The page at /dashboard, and the figures it shows."""
