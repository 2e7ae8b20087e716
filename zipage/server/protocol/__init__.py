"""Requests and responses: pydantic models, a file per API."""
