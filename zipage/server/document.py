"""The OpenAPI document: this server's requests and responses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from zipage.sampling_params import MAX_REPETITION_PENALTY, MAX_TEMPERATURE
from zipage.server.middleware import is_protected
from zipage.server.prompts import ROLES
from zipage.server.serving import Serving


def openapi_document(app: FastAPI, serving: Serving) -> dict[str, Any]:
    """The document of an application, with the actual error responses and this server's limits."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    limits = _limits(serving)
    for name, schema in schemas.items():
        for field, described in schema.get("properties", {}).items():
            usual = limits.get(field, {}) if name.endswith("Request") else {}
            _limit(described, limits.get(f"{name}.{field}", usual))
    # A message needs content or calls, or the assistant's its reasoning.
    needed: list[dict[str, Any]] = [
        {"content": {"type": ["string", "array"], "minItems": 1}},
        {"tool_calls": {"type": "array", "minItems": 1}},
    ]
    for field in ("reasoning_content", "reasoning"):
        text = {"type": "string", "minLength": 1}
        needed.append({field: text, "role": {"const": "assistant"}})
    schemas["Message"]["anyOf"] = [
        {"required": [*properties], "properties": properties} for properties in needed
    ]
    has_keys = bool(serving.settings.api_keys)
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI's default answer to malformed bodies; this server answers 400.
            operation["responses"].pop("422", None)
            if has_keys and is_protected(path):
                operation["security"] = [{"key": []}]
    return document


def _limits(serving: Serving) -> dict[str, dict[str, Any]]:
    """Limits of fields beyond their types, as JSON Schema, by field or by schema and field."""
    settings, length = serving.settings, serving.engine.max_model_len - 1
    token_id = {"minimum": 0, "maximum": serving.engine.vocab_size - 1}
    alternatives = {"minimum": 0, "maximum": settings.max_logprobs}
    penalty = {"minimum": -2, "maximum": 2}
    return {
        "model": {"enum": [*serving.names, "", None]},
        "messages": {"minItems": 1},
        # A chat template may know more roles.
        "Message.role": {"enum": [*ROLES]},
        "InputItem.role": {"enum": [*ROLES, None]},
        "ContentPart.type": {"enum": ["text", "input_text", "output_text"]},
        "input": {"minItems": 1},
        "InputItem.type": {
            "enum": ["message", "reasoning", "function_call", "function_call_output", None]
        },
        "CompletionRequest.prompt": {"minItems": 1, "minLength": 1, **token_id},
        "tokens": token_id,
        "n": {"minimum": 1, "maximum": settings.max_n},
        "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**31 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {
            "minimum": 1 / MAX_REPETITION_PENALTY,
            "maximum": MAX_REPETITION_PENALTY,
        },
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "logit_bias": {"minimum": -100, "maximum": 100},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
        "stop": {"minLength": 1, "maxItems": settings.max_stop},
        "stop_token_ids": {"maxItems": settings.max_stop, **token_id},
        "CompletionRequest.max_tokens": {"minimum": 0, "maximum": length},
        "max_tokens": {"minimum": 1, "maximum": length},
        "max_completion_tokens": {"minimum": 1, "maximum": length},
        "max_output_tokens": {"minimum": 1, "maximum": length},
        "min_tokens": {"minimum": 0, "maximum": length},
        "logprobs": alternatives,
        "top_logprobs": alternatives,
        "prompt_logprobs": alternatives,
        "kv_budget": {
            "minimum": serving.engine.config.block_size,
            "maximum": settings.max_kv_budget or 2**31 - 1,
        },
    }


_KEYWORDS = {
    "string": ("minLength",),
    "array": ("minItems", "maxItems"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum"),
}


def _limit(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Add limits to those parts of a field's schema that they apply to."""
    if "enum" in limits:
        schema |= limits
    for keyword in _KEYWORDS.get(schema.get("type", ""), ()):
        if keyword in limits:
            schema[keyword] = limits[keyword]
    parts = [*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
    for part in parts:
        if isinstance(part, dict) and "enum" not in limits:
            _limit(part, limits)
