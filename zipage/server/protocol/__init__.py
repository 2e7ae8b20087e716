"""What clients send and get: pydantic models, a file per API."""
