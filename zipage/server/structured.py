"""Structured output: what OpenAI's and vLLM's fields ask for, as one value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zipage.server.errors import bad_request
from zipage.server.protocol.sampling import SamplingFields


def structured_output(
    body: SamplingFields, call_schema: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The sampling option that a request's structured output needs; None for free text.

    Args:
        body: the request.
        call_schema: JSON schema of the tool calls that the answer must be.

    Raises:
        ApiError: it asks for several, for something malformed, or for what is not supported.
    """
    found = wanted_structures(body)
    if call_schema is not None:
        found["tool_choice"] = ("json", call_schema)
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(found)
        raise bad_request(next(iter(found)), f"give one way to structure the output, not {names}")
    name = next(iter(found))
    raise bad_request(name, f"{name}: structured output is not supported by this engine")


def wanted_structures(body: SamplingFields) -> dict[str, tuple[str, Any]]:
    """Field of the request to the kind of structure, and what it is of."""
    found: dict[str, tuple[str, Any]] = {}
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        found["response_format"] = ("json_object", True)
    elif wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
        if schema is None:
            raise bad_request(
                "response_format.json_schema", "response_format.json_schema.schema is missing"
            )
        found["response_format"] = ("json", schema)
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True)
        for name, value in given.items():
            kind = name.rstrip("_")
            if kind != "json_object" or value:
                found[f"structured_outputs.{kind}"] = (kind, _schema(kind, value))
        if not given:
            raise bad_request("structured_outputs", "structured_outputs is empty")
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            found[f"guided_{kind}"] = (kind, _schema(kind, value))
    return found


def _schema(kind: str, value: Any) -> Any:
    """A JSON schema may be given as text."""
    if kind == "json" and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise bad_request("json", f"the JSON schema is not JSON: {error}") from None
    return value
