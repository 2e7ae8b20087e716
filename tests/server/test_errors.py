"""Every mistake is answered in OpenAI's shape, with the right status and the field's name."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest

from tests.server.conftest import CHAT, SUM, Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage.config import EngineConfig
from zipage.errors import ConfigError, EngineDeadError, EngineOverloadedError
from zipage.server.protocol.sampling import ErrorResponse

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}

BAD = [
    # path, fields, the field at fault, a part of the message
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [""]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": None}, "prompt", ""),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", ""),
    (COMPLETIONS, {"prompt": [True]}, "prompt", ""),
    (COMPLETIONS, {"prompt": [320]}, "prompt", "0 to 319"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt", ""),
    (COMPLETIONS, {"prompt": ["a"] * 5000}, "prompt", "5000"),
    (COMPLETIONS, {"n": 10**9}, "n", "1000000000"),
    (COMPLETIONS, {"n": 0}, "n", "n=0"),
    (COMPLETIONS, {"n": 2, "best_of": 5}, "best_of", "not supported"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
    (COMPLETIONS, {"max_completion_tokens": 9}, "max_completion_tokens", "use max_tokens"),
    (COMPLETIONS, {"max_output_tokens": 0}, "max_output_tokens", "use max_tokens"),
    (COMPLETIONS, {"bad_words": ["x"]}, "bad_words", '["x"] is not supported: give'),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds", "token ids"),
    (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs", "use logprobs"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature", "number"),
    (COMPLETIONS, {"temperature": -1}, "temperature", "temperature=-1"),
    (COMPLETIONS, {"top_p": 0}, "top_p", "above 0"),
    (COMPLETIONS, {"top_k": -2}, "top_k", "top_k=-2"),
    (COMPLETIONS, {"min_p": 2}, "min_p", "min_p"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "-1"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", "integer"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens", "integer"),
    (COMPLETIONS, {"min_tokens": 99}, "min_tokens", "min_tokens=99"),
    (COMPLETIONS, {"stop": ["a"] * 65}, "stop", "65"),
    (COMPLETIONS, {"stop": [""]}, "stop", "stop"),
    (COMPLETIONS, {"stop": [1]}, "stop", "string"),
    (COMPLETIONS, {"stop_token_ids": [320]}, "stop_token_ids", "320"),
    (COMPLETIONS, {"logit_bias": {"999": 1}}, "logit_bias", "999"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "x"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias", "100"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs", "logprobs=-1 is not legal: must be from 0 to 20"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs", "-1"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    (COMPLETIONS, {"kv_budget": 64, "compression": "off"}, "kv_budget", "left out with"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (COMPLETIONS, {"priority": 2**40}, "priority", "32-bit"),
    (COMPLETIONS, {"seed": 2**70}, "seed", "seed"),
    (COMPLETIONS, {"kv_budget": 5}, "kv_budget", "multiple"),
    (COMPLETIONS, {"compression": "zip"}, "compression", ""),
    (COMPLETIONS, {"cache_salt": 5}, "cache_salt", "string"),
    (CHATS, {"messages": []}, "messages", "empty"),
    (CHATS, {"messages": "hi"}, "messages", "list"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages", "messages.0 has no content"),
    (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", ""),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
        "messages.0.content.0 is of type 'image_url'",
    ),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    (CHATS, {"top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
    (CHATS, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    (CHATS, {"n": 3, "best_of": 4}, "best_of", "ask for n"),
    (CHATS, {"use_beam_search": True}, "use_beam_search", "use_beam_search=true is not"),
    (CHATS, {"bad_words": ["x"]}, "bad_words", "logit_bias"),
    (CHATS, {"allowed_token_ids": [7]}, "allowed_token_ids", "structured_outputs"),
    (CHATS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "=0 is not supported"),
    (CHATS, {"thinking_token_budget": 9}, "thinking_token_budget", "=9"),
    (CHATS, {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection", "stop"),
    (CHATS, {"echo": True}, "echo", "/v1/completions"),
    (CHATS, {"functions": [{"name": "f"}]}, "functions", "use tools"),
    (CHATS, {"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    (CHATS, {"web_search_options": {}}, "web_search_options", "tools"),
    (CHATS, {"modalities": ["text", "audio"]}, "modalities", "text"),
    (CHATS, {"audio": {"voice": "alloy", "format": "wav"}}, "audio", "text"),
    (CHATS, {"verbosity": "low"}, "verbosity", "message"),
    (CHATS, {"max_output_tokens": 9}, "max_output_tokens", "use max_completion_tokens"),
    (CHATS, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", "20"),
    (CHATS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (CHATS, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    (CHATS, {"tools": [TOOL]}, "tools", "--tool-call-parser"),
    (CHATS, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        CHATS,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "'g'",
    ),
    (CHATS, {"chat_template": "{{ 1 }}"}, "chat_template", "--trust-chat-templates"),
    (CHATS, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    (CHATS, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "variable"),
    (CHATS, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    (
        CHATS,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude",
    ),
    (RESPONSES, {"input": []}, "input", "input is an empty list"),
    (RESPONSES, {"max_tokens": 9}, "max_tokens", "use max_output_tokens"),
    (RESPONSES, {"max_completion_tokens": 9}, "max_completion_tokens", "use max_output_tokens"),
    (RESPONSES, {"return_kv_stats": True}, "return_kv_stats", "/v1/completions and /v1/chat"),
    (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs", "/v1/completions and /v1/chat"),
    (RESPONSES, {"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
    (RESPONSES, {"background": True}, "background", "stored"),
    (RESPONSES, {"truncation": "auto"}, "truncation", "shorten"),
    (RESPONSES, {"n": 2}, "n", "one answer"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
    (RESPONSES, {"input": [{"type": "image"}]}, "input.0", "image"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "stored"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "stored"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation", "stored"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0", "web_search"),
    ("/detokenize", {"tokens": [320]}, "tokens", "0 to 319"),
    ("/tokenize", {"prompt": 5}, "prompt", ""),
]
BASE = {
    COMPLETIONS: {"prompt": "Add", "max_tokens": 4},
    CHATS: {"messages": CHAT, "max_tokens": 4},
    RESPONSES: {"input": "Add"},
}


@pytest.mark.parametrize(("path", "fields", "param", "part"), BAD)
def test_bad_values(
    client: Client, path: str, fields: dict[str, Any], param: str, part: str
) -> None:
    error = client.error(path, {**BASE.get(path, {}), **fields})
    assert error["param"] == param, error
    assert part in error["message"] and error["type"] == "invalid_request_error"
    # A stream is refused with the same status.
    if path in BASE and "stream_options" not in fields:
        assert client.error(path, {**BASE[path], **fields, "stream": True}) == error


NEUTRAL = [
    {"best_of": 1, "bad_words": [], "allowed_token_ids": None, "use_beam_search": False},
    {"truncate_prompt_tokens": None, "thinking_token_budget": -1, "vllm_xargs": {}, "suffix": ""},
    {"echo": False, "functions": [], "function_call": "auto", "modalities": ["text"]},
    {"audio": None, "verbosity": "medium", "top_logprobs": 0, "prompt_logprobs": None},
    {"background": False, "truncation": "disabled", "n": 1, "text": {"verbosity": "medium"}},
    # These change nothing, and no list of them is complete.
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "request_id": "r"},
    {"prompt_cache_key": "k", "safety_identifier": "s", "seed": 5, "stream_interval": 4, "odd": 1},
    {"model": ""},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=lambda fields: " ".join(fields))
def test_fields_that_ask_for_nothing(client: Client, fields: dict[str, Any]) -> None:
    for path, body in BASE.items():
        limit = {"max_output_tokens": 4} if path == RESPONSES else {}
        answer = client.ok(path, {**body, **limit, **fields})
        assert answer["model"] == "zipage-tiny"


def test_one_limit_under_several_names(client: Client) -> None:
    # guidellm sends both to /v1/completions.
    fields = {"max_tokens": 2, "max_completion_tokens": 2}
    for path, more in ((COMPLETIONS, {}), (CHATS, {}), (RESPONSES, {"max_output_tokens": 2})):
        client.ok(path, {**BASE[path], **fields, **more})


def test_the_best_of_n_is_n(client: Client) -> None:
    for path in (COMPLETIONS, CHATS):
        many = {**BASE[path], "n": 2, "best_of": 2, "temperature": 1.0}
        assert len(client.ok(path, many)["choices"]) == 2


def test_lone_surrogates_are_named(client: Client) -> None:
    for text, fault in [
        (rb"\ud800", rb"\ud800"),
        (rb"a\uDFFFb", rb"\uDFFF"),
        (rb"\ud83d\ude00 \\\ud83d!", rb"\ud83d"),
        (rb"\ud83d\\ude00", rb"\ud83d"),
    ]:
        error = client.error(COMPLETIONS, b'{"prompt": "' + text + b'"}')
        assert f"lone surrogate {fault.decode()}," in error["message"], error
    for text in (rb"\ud83d\ude00", rb"\\ud800"):
        client.ok(COMPLETIONS, b'{"max_tokens": 1, "prompt": "' + text + b'"}')
        error = client.error(COMPLETIONS, b'{"max_tokens": 1, "prompt": "' + text + b'", }')
        assert "surrogate" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "Add", "temperature": NaN}',
        b'{"prompt": "Add", "temperature": Infinity}',
        b'{"prompt": "Add", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\udfffb", "stop": ["\\ud800"]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ',
        b"[" * 100_000,
        b"{'prompt': 'Add'}",
        b"\x00",
    ],
)
def test_what_is_not_json(client: Client, body: bytes) -> None:
    answer = client.post(COMPLETIONS, body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"text"', b""])
def test_json_that_is_no_object(client: Client, body: bytes) -> None:
    answer = client.post(COMPLETIONS, body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_errors_of_http(client: Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answers = [
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/models/other"), 404),
        (client.get(COMPLETIONS), 405),
        (client.request("DELETE", "/health"), 405),
        (client.post(COMPLETIONS, b'{"prompt": "Add"}', headers=form), 415),
        (client.request("POST", COMPLETIONS, content=b'{"prompt": "Add"}'), 415),
        (client.post(COMPLETIONS, b"...", headers={"Content-Encoding": "gzip"}), 415),
        (client.post(COMPLETIONS, b'"' + b"[" * 200 + b'"'), 400),
    ]
    for answer, status in answers:
        assert answer.status_code == status
        ErrorResponse.model_validate(answer.json(), strict=True)
    assert answers[2][0].headers["Allow"] == "POST"


def test_an_unknown_model(client: Client) -> None:
    for path, body in BASE.items():
        error = client.error(path, {**body, "model": "gpt-5"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_context_length_errors_name_the_numbers(client: Client) -> None:
    tokens = client.ok("/tokenize", {"messages": CHAT})["count"]
    error = client.error(CHATS, {"messages": CHAT, "max_tokens": 2040})
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    for number in ("2048", str(tokens), "2040", str(tokens + 2040)):
        assert f"{number} " in error["message"] or f"({number} " in error["message"]
    fits = {"messages": CHAT, "max_tokens": 2048 - tokens, "stop": "#"}
    assert client.post(CHATS, fits).status_code == 200
    long = [{"role": "user", "content": "Add these numbers. " * 700}]
    assert "However, your messages have " in client.error(CHATS, {"messages": long})["message"]
    error = client.error(COMPLETIONS, {"prompt": [6] * 2048})
    assert "2048 tokens. However, your prompt has 2048" in error["message"]
    assert client.ok(COMPLETIONS, {"prompt": [6] * 2047})["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "prompt", "field"),
    [
        (COMPLETIONS, {"prompt": [6] * 40}, "max_tokens"),
        (COMPLETIONS, {"prompt": [[6], [6] * 40]}, "max_tokens"),
        (CHATS, {"messages": CHAT}, "max_tokens"),
        (CHATS, {"messages": CHAT}, "max_completion_tokens"),
        (RESPONSES, {"input": SUM}, "max_output_tokens"),
    ],
)
def test_too_many_tokens_asked_for_name_the_field_that_asks(
    client: Client, path: str, prompt: dict[str, Any], field: str
) -> None:
    for most in (-1, 2047, 2048, 10**9):
        error = client.error(path, {**prompt, field: most})
        assert error["param"] == field
    # What the message says there is room for is legal, and one token more is not.
    room = int(error["message"].rpartition("at most ")[2].rstrip("."))
    assert client.error(path, {**prompt, field: room + 1})["param"] == field
    assert client.post(path, {**prompt, field: room, "logit_bias": {"2": 100}}).status_code == 200
    (name,) = prompt
    word = "Add these numbers. " * 700
    alone = {"prompt": [6] * 2048, "input": word, "messages": [{"role": "user", "content": word}]}
    assert client.error(path, {name: alone[name], field: 1})["param"] == name


def test_a_large_body_is_read_like_a_small_one(client: Client) -> None:
    big = "x" * 1_200_000
    body = {"prompt": "Add", "max_tokens": 1, "x": [big, [[1]] * 1000]}
    assert client.ok(COMPLETIONS, body)["choices"]
    nested: Any = 1
    for _ in range(120):
        nested = [nested]
    for bad, word in (
        (json.dumps(body).encode()[:-1], "valid JSON"),
        (json.dumps({**body, "x": [big, nested]}).encode(), "100 levels"),
        (json.dumps({**body, "x": [big, float("nan")]}).encode(), "valid JSON"),
    ):
        error = client.error(COMPLETIONS, bad)
        assert error["code"] == "invalid_json" and word in error["message"]


@pytest.mark.parametrize("part", ['"":0', "[]", "{}"])
def test_too_many_parts_are_refused(client: Client, part: str) -> None:
    def body(count: int, text: str) -> bytes:
        parts = ",".join([part] * (count - 6))  # the others: an object, its members, one's value
        parts = f"{{{parts}}}" if ":" in part else f"[{parts}]"
        text = json.dumps(text)
        return f'{{"prompt":"Add","max_tokens":1,"text":{text},"parts":{parts}}}'.encode()

    for text in ("a", '{"[:"\\"[:' * 50_000):
        assert client.post(COMPLETIONS, body(1 << 18, text)).status_code == 200
        error = client.error(COMPLETIONS, body((1 << 18) + 1, text))
        assert error["code"] == "invalid_json" and "more than 262144 lists" in error["message"]


def test_deep_nesting_is_refused(client: Client) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for level in range(levels):
            value = [value, 2] if level % 2 else {"a": value}
        return value

    function = {"type": "function", "name": "f"}
    for path, body in (BASE | {RESPONSES: {"input": "Add", "max_output_tokens": 1}}).items():
        for levels, status in ((99, 200), (100, 400), (300, 400), (900, 400)):
            answer = client.post(path, {**body, "unknown": nested(levels)})
            assert answer.status_code == status, answer.text
    for levels, status in ((90, 200), (300, 400)):
        tool = {**function, "parameters": {"a": nested(levels)}}
        body = {"input": "Add", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
        assert client.post(RESPONSES, body).status_code == status
    wide = {"prompt": [[298] for _ in range(200)], "max_tokens": 1}
    assert client.post(COMPLETIONS, wide).status_code == 200
    # JSON inside a text.
    for text in ("[" * 5000, '{"a":' * 5000, '{"a": ' + "[" * 5000 + "]" * 5000 + "}"):
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = client.post(CHATS, {"messages": messages, "max_tokens": 1})
        assert answer.status_code in (200, 400), answer.text
        for field in ("guided_json", "guided_grammar"):
            fields = {"prompt": "Add", field: "start: %json " * (field[7] == "g") + text}
            client.error(COMPLETIONS, fields)


def test_texts_that_cannot_fit_are_not_encoded(engine: Any) -> None:
    client, text = Client(engine), "Add these numbers. " * 200_000
    for path, body in [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["Add", text]}),
        (CHATS, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ]:
        begun = time.perf_counter()
        error = client.error(path, body)
        assert error["code"] == "context_length_exceeded" and "2048 tokens" in error["message"]
        assert error["param"] == next(name for name in body)
        assert time.perf_counter() - begun < 1.5  # encoding it takes more than 2 s
    # What may fit is counted, though it does not.
    assert client.ok("/tokenize", {"prompt": "Add these numbers. " * 700})["count"] > 2048


def test_limits(engine: Any) -> None:
    client = Client(engine, max_n=3, max_prompts=2, max_stop=1, max_body_size=2000, max_logprobs=1)
    for fields, param in [
        ({"n": 4}, "n"),
        ({"prompt": ["a"] * 3}, "prompt"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"logprobs": 2}, "logprobs"),
    ]:
        assert client.error(COMPLETIONS, {"prompt": "Add", **fields})["param"] == param
    answer = client.post(COMPLETIONS, {"prompt": "a" * 3000})
    assert answer.status_code == 413 and "2000" in answer.json()["error"]["message"]


def test_the_largest_kv_budget() -> None:
    engine = ScriptedEngine(["."], tiny_tokenizer())
    engine.config = EngineConfig(block_size=16, kv_budget=64)
    client = Client(engine, max_kv_budget=128)
    for path, body in [
        (COMPLETIONS, {"prompt": "Add"}),
        (CHATS, {"messages": CHAT}),
        (RESPONSES, {"input": "Add"}),
    ]:
        error = client.error(path, {**body, "kv_budget": 144})
        assert error["param"] == "kv_budget"
        assert error["message"] == "kv_budget=144 is more than this server allows, 128"
        error = client.error(path, {**body, "compression": "off"})
        assert error["param"] == "compression" and "kv_budget of up to 128" in error["message"]
        for fields in ({}, {"kv_budget": 128}, {"compression": "on"}):
            client.ok(path, {**body, **fields})
    document = client.get("/openapi.json").json()["components"]["schemas"]
    assert document["CompletionRequest"]["properties"]["kv_budget"]["anyOf"][0]["maximum"] == 128
    for options, word in [
        ({"kv_budget": 192}, "kv_budget=192 must be at most max_kv_budget=128"),
        ({"kv_budget": None}, "kv_budget=None"),
        ({"compression": "full"}, "compression='full'"),
    ]:
        engine.config = EngineConfig(**{"block_size": 16, **options})
        with pytest.raises(ConfigError, match=word):
            Client(engine, max_kv_budget=128)


def test_keys(engine: Any) -> None:
    client = Client(engine, api_keys=["first", "second"])
    for path in ("/v1/models", "/v1/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert client.post("/tokenize", {"prompt": "Add"}).status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "bearer second"}).status_code == 200
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/health", "/version", "/metrics", "/dashboard", "/openapi.json"),
        *("/v1/models", "/v1/models/zipage-tiny", "/v1/models/none"),
        *(COMPLETIONS, "/nowhere"),
    ],
)
def test_head_answers_like_get_without_a_body(live: str, path: str) -> None:
    with httpx.Client(base_url=live) as http:
        for _ in range(2):  # on one connection, which a body would spoil
            head, get = http.head(path), http.get(path)
            assert head.status_code == get.status_code and head.content == b""
            kept = ["content-type", "allow"]
            if get.status_code == 200 and path != "/metrics":  # whose numbers change
                kept.append("content-length")
            assert [head.headers.get(n) for n in kept] == [get.headers.get(n) for n in kept]


def test_the_root_leads_on(engine: Any, client: Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")
    plain = Client(engine, dashboard=False)
    answer = plain.get("/")
    assert answer.status_code == 200
    for name in ("models", "health", "document"):
        assert plain.get(answer.json()[name]).status_code == 200


def test_head_is_told_what_get_is(engine: Any) -> None:
    client = Client(engine, api_keys=["key"])
    assert client.request("HEAD", "/v1/models").status_code == 401
    assert client.request("HEAD", "/health").status_code == 200
    assert client.request("HEAD", "/dashboard/events").status_code in (401, 405)
    client.app.state.serving.draining = True
    assert client.request("HEAD", "/health").status_code == 503


def test_names_of_the_model(engine: Any) -> None:
    client = Client(engine, served_model_names=["a", "b/c"])
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b/c"]
    assert client.get("/v1/models/b/c").json()["max_model_len"] == 2048
    assert client.ok(COMPLETIONS, {"prompt": "Add", "model": "b/c"})["model"] == "b/c"
    assert client.ok(COMPLETIONS, {"prompt": "Add"})["model"] == "a"


def test_origins(engine: Any) -> None:
    client = Client(engine, allowed_origins=["https://a.example"], api_keys=["key"])
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert client.request("OPTIONS", COMPLETIONS, headers=headers).status_code == 200
    answer = client.get("/health", headers={"Origin": "https://a.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    answer = client.get("/health", headers={"Origin": "https://b.example"})
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_request_ids(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "Add", "max_tokens": 1}
    with caplog.at_level(logging.INFO, logger="zipage"):
        answer = client.post(COMPLETIONS, body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["X-Request-Id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    (access,) = [r for r in caplog.records if r.name == "zipage.server.access"]
    assert (access.request_id, access.status, access.path) == ("mine-1", 200, COMPLETIONS)
    assert any("cmpl-mine-1" in str(getattr(r, "request_id", "")) for r in caplog.records)
    assert not any("Add" in r.getMessage() for r in caplog.records)
    twice = client.post(COMPLETIONS, body, headers={"X-Request-Id": "mine-1"})
    assert twice.status_code == 200
    made = client.post(COMPLETIONS, body, headers={"X-Request-Id": "a b\n" * 100})
    assert made.headers["X-Request-Id"] not in ("", "a b\n" * 100)


def test_prompts_are_logged_if_asked(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zipage"):
        Client(engine, log_prompts=True).ok(COMPLETIONS, {"prompt": SUM, "max_tokens": 1})
    assert any(SUM[:18] in str(getattr(r, "body", "")) for r in caplog.records)


def test_a_dead_engine() -> None:
    client = Client(engine := ScriptedEngine(["a"], tiny_tokenizer()))
    assert client.get("/health").json() == {"status": "ok"}
    engine.shutdown()
    assert client.get("/health").status_code == 503
    for body in ({"prompt": "Add"}, {"prompt": "Add", "stream": True}):
        error = client.error(COMPLETIONS, body, 503)
        assert error["type"] == "service_unavailable_error"


def test_an_overloaded_engine() -> None:
    engine = ScriptedEngine([EngineOverloadedError("9 answers wait")], tiny_tokenizer())
    for stream in (True, False):
        answer = Client(engine).post(COMPLETIONS, {"prompt": "Add", "stream": stream})
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    # More than can ever be taken is no matter of trying again.
    client = Client(engine, max_queued_requests=44)
    body = {"prompt": ["Add"] * 3, "n": 101, "temperature": 1.0}
    assert "303 answers" in client.error(COMPLETIONS, body)["message"]


def test_a_draining_server() -> None:
    client = Client(ScriptedEngine(["a"], tiny_tokenizer()))
    client.app.state.serving.draining = True
    assert client.get("/health").status_code == 503
    assert client.post(COMPLETIONS, {"prompt": "Add"}).headers["Retry-After"]


@pytest.mark.parametrize("path", list(BASE))
def test_an_error_in_mid_stream_ends_the_stream(path: str) -> None:
    engine = ScriptedEngine(["a", "b", EngineDeadError("the engine stopped")], tiny_tokenizer())
    answer = Client(engine).post(path, {**BASE[path], "stream": True})
    assert answer.status_code == 200
    last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
    assert last["error"]["type"] == "service_unavailable_error"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_bug_is_no_secret_but_its_text_is(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine([KeyError("inner secret")], tiny_tokenizer())
    answer = Client(engine).post(COMPLETIONS, {"prompt": "Add", "stream": stream})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert any("inner secret" in (r.exc_text or str(r.exc_info)) for r in caplog.records)


def test_a_request_that_takes_too_long() -> None:
    engine = ScriptedEngine(["a"] * 100, tiny_tokenizer())
    engine.delay = 0.05
    client = Client(engine, request_timeout=0.12)
    assert client.error(COMPLETIONS, {"prompt": "Add"}, 504)["type"] == "timeout_error"
    answer = client.post(COMPLETIONS, {"prompt": "Add", "stream": True})
    assert "timeout_error" in answer.text.rpartition("data: ")[2]
    assert engine.aborted == 2
