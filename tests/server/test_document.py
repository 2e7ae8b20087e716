"""The OpenAPI document says what is answered, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import CHAT, Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage.server.protocol.chat import ChatCompletionResponse
from zipage.server.protocol.completions import CompletionResponse
from zipage.server.protocol.responses import ResponseObject
from zipage.server.protocol.sampling import ErrorResponse
from zipage.server.protocol.system import DetokenizeResponse, TokenizeResponse

PATHS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": ({"prompt": "Add"}, CompletionResponse),
    "/v1/chat/completions": ({"messages": CHAT}, ChatCompletionResponse),
    "/v1/responses": ({"input": "Add"}, ResponseObject),
    "/tokenize": ({"messages": CHAT}, TokenizeResponse),
    "/detokenize": ({"tokens": [6]}, DetokenizeResponse),
}
ODD = [None, True, 0, 1, -1, 2**63, 1e300, 0.5, "", "a", "\x00", [], [1], ["a"], [[1]], [{}], {}]
ODD += [{"type": "json_object"}, {"type": "function", "name": "f"}, {"a": {"b": [1, None]}}]


def client() -> Client:
    return Client(ScriptedEngine(["Add", "."], tiny_tokenizer()))


def fields_of(document: dict[str, Any], path: str) -> Iterator[str]:
    """Names of all fields of a path's request body."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for part in body.get("oneOf", body.get("anyOf", [body])):
        name = part["$ref"].rpartition("/")[2]
        yield from document["components"]["schemas"][name]["properties"]


@pytest.mark.parametrize("path", list(PATHS))
def test_odd_values_of_every_field(path: str) -> None:
    odd = client()
    document = odd.get("/openapi.json").json()
    documented = set(document["paths"][path]["post"]["responses"])
    base, answer_model = PATHS[path]
    names = set(fields_of(document, path))
    assert len(names) > 1
    for name in sorted(names - {"stream"}):
        for value in ODD:
            answer = odd.post(path, {**base, name: value})
            told = f"{name}={value!r}: {answer.status_code} {answer.text}"
            assert str(answer.status_code) in documented and answer.status_code < 500, told
            model = answer_model if answer.status_code == 200 else ErrorResponse
            model.model_validate(answer.json(), strict=True)


def test_keys_are_documented() -> None:
    plain = client().get("/openapi.json").json()
    assert "securitySchemes" not in plain["components"]
    engine = ScriptedEngine(["."], tiny_tokenizer())
    document = Client(engine, api_keys=["k"]).get("/openapi.json").json()
    assert document["paths"]["/v1/models"]["get"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]


def test_no_reference_is_broken() -> None:
    document = client().get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"].rpartition("/")[2]
            for child in node.values():
                yield from references(child)
        elif isinstance(node, list):
            for child in node:
                yield from references(child)

    found = set(references(document))
    assert found <= set(schemas) and "422" not in str(document["paths"])
