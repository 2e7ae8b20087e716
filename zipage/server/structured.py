"""Structured output: what OpenAI's and vLLM's fields ask for, as one value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zipage.server.errors import bad_request
from zipage.server.protocol.sampling import SamplingFields


def structured_output(
    body: SamplingFields, call_schema: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]] | None:
    """What form the answer of a request must have.

    Args:
        body: the request.
        call_schema: JSON schema of the tool calls that the answer must be.

    Returns:
        the field of the request that asks for it, and the option of
        `zipage.StructuredOutputsParams` that says it; None for free text.

    Raises:
        ApiError: several fields ask for one, or one is malformed.
    """
    found: dict[str, dict[str, Any]] = {}
    if call_schema is not None:
        found["tool_choice"] = {"json": call_schema}
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        found["response_format"] = {"json_object": True}
    elif wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
        if schema is None:
            name = "response_format.json_schema.schema"
            raise bad_request(name, f"{name} is missing")
        found["response_format"] = {"json": _schema(schema)}
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        if len(given) != 1:
            message = "structured_outputs needs exactly one of json, json_object, regex, choice"
            raise bad_request("structured_outputs", f"{message}, grammar")
        if given.get("json_object"):
            found["structured_outputs"] = given
        elif "json_object" not in given:
            found["structured_outputs"] = {n: _schema(v) for n, v in given.items()}
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            found[f"guided_{kind}"] = {kind: _schema(value)}
    if len(found) > 1:
        names = ", ".join(found)
        raise bad_request(next(iter(found)), f"give one way to structure the output, not {names}")
    return next(iter(found.items()), None)


def _schema(value: Any) -> Any:
    """A schema may also be true or false; as text it is taken in any case."""
    return json.dumps(value) if isinstance(value, bool) else value
