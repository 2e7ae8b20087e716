"""Structured output: OpenAI's and vLLM's request fields as one value."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from zipage.errors import RequestError
from zipage.execution.grammar import schema_fault
from zipage.server.errors import ApiError, bad_request
from zipage.server.protocol.sampling import ResponseFormat, SamplingFields


@dataclasses.dataclass
class RequestedForm:
    """The form that a request requires of its answer, and the field that requires it.

    Attributes:
        field: the field of the request.
        options: the form as options of `zipage.StructuredOutputsParams`.
        parts: JSON schemas in other fields from which `options` is built, by field.
    """

    field: str
    options: dict[str, Any]
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def named(self, error: Exception) -> Exception:
        """An error about the form, naming the client's field; any other error unchanged."""
        if not isinstance(error, (ApiError, RequestError)):
            return error
        status = error.status_code if isinstance(error, ApiError) else 400
        text = error.message if isinstance(error, ApiError) else str(error)
        found = re.match(r"(the request failed: )?structured_outputs(?:\.\w+)?(?=\W)", text)
        if found is None:
            return error
        name = self.field
        return ApiError(status, (found[1] or "") + name + text[found.end() :], name)

    def located(self, error: Exception) -> Exception:
        """Like `named`, but names the part at fault. Compiles the parts: not for an event loop."""
        named = self.named(error)
        if named is not error and isinstance(error, RequestError):
            for part, schema in self.parts.items():
                if reason := schema_fault(schema):
                    return bad_request(part, f"{part} is not legal: {reason}")
        return named


def structured_output(
    body: SamplingFields, others: Mapping[str, RequestedForm | None]
) -> RequestedForm | None:
    """The form that a request requires of its answer; None for free text.

    Args:
        body: the request.
        others: forms required by fields of its API, by field; None for fields that require none.

    Raises:
        ApiError: several fields require a form, or one is malformed.
    """
    found = {name: form for name, form in others.items() if form is not None}
    if (form := form_of("response_format", body.response_format)) is not None:
        found["response_format"] = form
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        compact = given.pop("disable_any_whitespace", None)
        if len(given) != 1:
            message = "structured_outputs needs exactly one of json, json_object, regex, choice"
            raise bad_request("structured_outputs", f"{message}, grammar")
        ((kind, value),) = given.items()
        if kind != "json_object" or value:
            name = f"structured_outputs.{kind}"
            options = {kind: _schema(value) if kind == "json" else value}
            if compact is not None:
                options["disable_any_whitespace"] = compact
            found["structured_outputs"] = RequestedForm(name, options)
    for kind in ("json", "regex", "choice", "grammar"):
        name, value = f"guided_{kind}", getattr(body, f"guided_{kind}")
        if value is not None:
            found[name] = RequestedForm(name, {kind: _schema(value)})
    if len(found) > 1:
        names = ", ".join(found)
        raise bad_request(next(iter(found)), f"give one way to structure the output, not {names}")
    return next(iter(found.values()), None)


def form_of(
    field: str, wanted: ResponseFormat | None, schema_field: str = "json_schema.schema"
) -> RequestedForm | None:
    """The form that OpenAI's fields require.

    Args:
        field: the field of the request.
        wanted: its value.
        schema_field: path of the schema within the field.

    Raises:
        ApiError: the schema is missing.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return RequestedForm(field, {"json_object": True})
    schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
    name = f"{field}.{schema_field}"
    if schema is None:
        raise bad_request(name, f"{name} is missing")
    return RequestedForm(name, {"json": _schema(schema)})


def _schema(value: Any) -> Any:
    """A schema, with true and false as text, the only form `StructuredOutputsParams` takes."""
    return json.dumps(value) if isinstance(value, bool) else value
