"""Every way to ask for structured output becomes the same sampling option."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sampling.tokenizers_for_tests import make_tokenizer
from tests.server.conftest import CHAT, Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from tests.server.test_chat import HERMES, TOOLS, joined
from zipage.execution.grammar import GrammarCompiler

URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", None),
    ({"response_format": NAMED}, "json", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
    ({"structured_outputs": {"json": True}}, "json", {}),
    ({"structured_outputs": {"json_object": True}}, "json_object", None),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ({"guided_json": SCHEMA}, "json", SCHEMA),
    ({"guided_json": False}, "json", {"not": {}}),
    ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"guided_regex": "x*"}, "regex", "x*"),
    ({"guided_choice": ["a"]}, "choice", ["a"]),
]


def form_of(engine: ScriptedEngine) -> Any:
    return engine.seen[-1][1].structured_outputs


@pytest.mark.parametrize(("fields", "kind", "value"), FORMS)
@pytest.mark.parametrize("path", [URL, "/v1/completions"])
def test_forms(path: str, fields: dict[str, Any], kind: str, value: Any) -> None:
    engine = ScriptedEngine(["5"], tiny_tokenizer())
    body = {"prompt": "Add"} if path != URL else {"messages": CHAT}
    Client(engine).ok(path, {**body, **fields})
    form = form_of(engine)
    assert form.kind == kind
    if kind in ("json", "choice"):
        assert json.loads(form.text) == value
    elif value is not None:
        assert form.text == value
    # zipage-tiny's template opens its reasoning: the form is that of what follows.
    assert form.reasoning_end_token_ids == ((4,) if path == URL else None)


def test_responses() -> None:
    engine = ScriptedEngine(["5"], tiny_tokenizer())
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    Client(engine).ok("/v1/responses", {"input": "Add", "text": {"format": wanted}})
    assert json.loads(form_of(engine).text) == SCHEMA


def test_no_form() -> None:
    engine = ScriptedEngine(["5"], tiny_tokenizer())
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": None}):
        Client(engine).ok(URL, {"messages": CHAT, **fields})
        assert form_of(engine) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"pattern": "a"}}, "structured_outputs.pattern"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
    ],
)
def test_mistakes(fields: dict[str, Any], param: str) -> None:
    client = Client(ScriptedEngine(["5"], tiny_tokenizer()))
    assert client.error(URL, {"messages": CHAT, **fields})["param"] == param


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


RESPONSES = "/v1/responses"
GOOD, BAD = {"type": "integer"}, {"type": "strin"}
NAMED_TOOL = {"type": "function", "function": {"name": "b"}}
#: What the engine refuses, and the field it must be called by.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        URL,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
        "response_format.json_schema.schema",
    ),
    (URL, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    (URL, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (URL, {"structured_outputs": {"choice": ["qqq"]}}, "structured_outputs.choice"),
    (URL, {"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    (URL, {"guided_json": BAD}, "guided_json"),
    (URL, {"guided_json": "{"}, "guided_json"),
    (URL, {"guided_regex": "("}, "guided_regex"),
    (URL, {"guided_choice": ["qqq"]}, "guided_choice"),
    (URL, {"guided_choice": [""]}, "guided_choice"),
    (URL, {"guided_grammar": "start: x"}, "guided_grammar"),
    (
        URL,
        {"tools": [tool("a", GOOD), tool("b", BAD)], "tool_choice": NAMED_TOOL},
        "tools.1.function.parameters",
    ),
    (
        URL,
        {"tools": [tool("a", GOOD), tool("b", BAD)], "tool_choice": "required"},
        "tools.1.function.parameters",
    ),
    (URL, {"tools": [tool("a", GOOD)], "tool_choice": "required"}, "tool_choice"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
        "text.format.schema",
    ),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (
        RESPONSES,
        {
            "tools": [{"type": "function", "name": "a", "parameters": BAD}],
            "tool_choice": {"type": "function", "name": "a"},
        },
        "tools.0.parameters",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field_that_was_sent(
    client: Client, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    base = {"input": "Add"} if path == RESPONSES else {"messages": CHAT}
    error = client.error(path, {**base, **fields, "stream": stream})
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert "structured_outputs" in param or "structured_outputs" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_failures_name_the_field_that_was_sent(client: Client, stream: bool) -> None:
    """Once the answer has begun: a dead end that the vocabulary leads into."""
    body = {"prompt": "Add", "guided_regex": "[0-9]{40}q", "max_tokens": 99}
    if stream:
        answer = client.post("/v1/completions", {**body, "stream": True})
        error = json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
    else:
        error = client.error("/v1/completions", body, 500)
    assert error["param"] == "guided_regex"
    assert error["message"].startswith("the request failed: guided_regex: ")


@pytest.mark.parametrize("server", [False, True])
def test_white_space(server: bool) -> None:
    """The server's option is that of every way to ask, and a request's own field comes first."""
    engine = ScriptedEngine(["5"], tiny_tokenizer())
    client = Client(engine, structured_outputs_disable_any_whitespace=server)
    for fields, _, _ in FORMS:
        client.ok(URL, {"messages": CHAT, **fields})
        assert form_of(engine).disable_any_whitespace is server
    for own in (False, True):
        form = {"json": SCHEMA, "disable_any_whitespace": own}
        client.ok(URL, {"messages": CHAT, "structured_outputs": form})
        assert form_of(engine).disable_any_whitespace is own
    only = {"messages": CHAT, "structured_outputs": {"disable_any_whitespace": True}}
    assert client.error(URL, only)["param"] == "structured_outputs"


def test_forced_calls() -> None:
    call = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    # The engine holds an answer to its form from the end of the reasoning on.
    engine = ScriptedEngine(list("</think>" + call), tiny_tokenizer(HERMES))
    client = Client(engine)
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    required = {**body, "tool_choice": "required"}
    choice = client.ok(URL, required)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert joined(client.events(URL, required))["calls"] == [["get_weather", '{"city": "Rome"}']]
    schema = json.loads(form_of(engine).text)
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "get_weather"}
    engine.pieces = ["</think>", '{"city"', ': "Rome"}']
    named = {**body, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    streamed = joined(client.events(URL, named))
    assert streamed["calls"] == [["get_weather", '{"city": "Rome"}']]
    assert streamed["finish_reason"] == "tool_calls"
    assert json.loads(form_of(engine).text) == TOOLS[0]["function"]["parameters"]


@pytest.mark.parametrize("given", [None, "https://example.com/parameters", "parameters", ""])
def test_parameters_may_refer_to_their_own_definitions(given: str | None) -> None:
    """As schemas do that pydantic makes: of every tool to its own, wherever they stand, also
    where two say that they are the same document."""
    own = {} if given is None else {"$id": given}
    tools = [
        tool(
            name,
            {
                **own,
                "type": "object",
                "properties": {"one": {"$ref": "#/$defs/Part"}, "more": {"$ref": "#"}},
                "required": ["one"],
                "additionalProperties": False,
                "$defs": {"Part": {"const": value}},
            },
        )
        for name, value in (("a", 1), ("b", 2))
    ]
    engine = ScriptedEngine(['[{"name": "a", "parameters": {"one": 1}}]'], tiny_tokenizer(HERMES))
    Client(engine).ok(URL, {"messages": CHAT, "tools": tools, "tool_choice": "required"})
    tokenizer = make_tokenizer("byte_level")
    compiled = GrammarCompiler(lambda: tokenizer, len(tokenizer), []).compile(form_of(engine))
    for name, value, legal in (("a", 1, True), ("b", 2, True), ("a", 2, False), ("b", 1, False)):
        for parameters in ({"one": value}, {"one": value, "more": {"one": value}}):
            call = json.dumps([{"name": name, "parameters": parameters}])
            parser = compiled.deep_copy()
            ids = tokenizer.encode(call, add_special_tokens=False)
            assert (parser.consume_tokens(ids) and parser.is_accepting()) is legal


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_what_comes_before_the_form_is_reasoning(opening: str) -> None:
    """Whether or not the model opens it, where the template leaves that to the model."""
    engine = ScriptedEngine(list(f"{opening}so <b>, 5</think>\n7"), tiny_tokenizer(HERMES))
    client = Client(engine)
    body = {"messages": CHAT, "guided_regex": "[0-9]"}
    answer = client.ok(URL, body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so <b>, 5", "7")
    streamed = joined(client.events(URL, body))
    assert (streamed["reasoning"], streamed["content"]) == ("so <b>, 5", "7")
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}
    response = client.ok("/v1/responses", {"input": "Add", "text": {"format": wanted}})
    texts = [part["text"] for item in response["output"] for part in item["content"]]
    assert texts == ["so <b>, 5", "7"]
    # Without a form the answer reasons only if it says so.
    free = client.ok(URL, {"messages": CHAT})["choices"][0]["message"]
    assert free["content"] == ("7" if opening else "so <b>, 5</think>\n7")


def test_the_engine_obeys(client: Client) -> None:
    """On the embedded model: reasoning first, then an answer of the form."""
    body = {"messages": CHAT, "max_tokens": 400, "structured_outputs": {"regex": " ?[0-9]{3}"}}
    message = client.ok(URL, body)["choices"][0]["message"]
    assert message["reasoning"].endswith("153.") and message["content"].strip().isdigit()
    assert len(message["content"].strip()) == 3
    choice = {"prompt": "Add", "structured_outputs": {"choice": [" sky", " pin"]}}
    assert client.ok("/v1/completions", choice)["choices"][0]["text"] in (" sky", " pin")
