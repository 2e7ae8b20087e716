"""/v1/chat/completions and /v1/responses: reasoning, tools, finish reasons, shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import CHAT, SUM, Client, read_events
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage.server.protocol.chat import ChatCompletionChunk, ChatCompletionResponse
from zipage.server.protocol.responses import ResponseObject

URL = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
HERMES = (
    "{% if tools %}tools <tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA = '{% if tools %}tools "parameters"{% endif %}' + HERMES.partition("{% endif %}")[2]
ANSWER = "The answer is \\boxed{153}."


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a stream adds up to, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reasons = []
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning_content") == delta.get("reasoning")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    (message["finish_reason"],) = reasons
    return message


def test_reasoning_and_answer(client: Client) -> None:
    answer = client.ok(URL, {"messages": CHAT})
    ChatCompletionResponse.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["content"] == ANSWER and choice["finish_reason"] == "stop"
    assert message["reasoning_content"].endswith("153.") and "think" not in str(message)
    assert message["reasoning"] == message["reasoning_content"]
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    events = client.events(URL, {"messages": CHAT, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    streamed = joined(events)
    assert streamed["content"] == ANSWER
    assert streamed["reasoning"] == message["reasoning_content"]
    assert streamed["finish_reason"] == "stop"


def test_reasoning_can_be_left_in_or_out(engine: Any, client: Client) -> None:
    raw = Client(engine, reasoning_parser="none").ok(URL, {"messages": CHAT})
    message = raw["choices"][0]["message"]
    assert "</think>" in message["content"] and message["reasoning_content"] is None
    quiet = {"messages": CHAT, "include_reasoning": False}
    assert client.ok(URL, quiet)["choices"][0]["message"]["reasoning"] is None
    assert joined(client.events(URL, quiet))["reasoning"] == ""


def test_cut_in_the_reasoning(client: Client) -> None:
    body = {"messages": CHAT, "max_completion_tokens": 7, "max_tokens": 1}
    answer = client.ok(URL, body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["message"]["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7


def test_choices_and_logprobs(client: Client) -> None:
    body = {
        "messages": CHAT,
        "n": 2,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    answer = client.ok(URL, body)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == len(choice["token_ids"]) == 5
        for token in content:
            assert len(token["top_logprobs"]) == 2
            assert bytes(token["bytes"]).decode() == token["token"]
            assert token["top_logprobs"][0]["logprob"] == token["logprob"]
    assert answer["prompt_token_ids"] == client.ok("/tokenize", {"messages": CHAT})["tokens"]
    events = client.events(URL, body)
    for index in (0, 1):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        told = [t for c in parts if c["logprobs"] for t in c["logprobs"]["content"]]
        assert told == answer["choices"][index]["logprobs"]["content"]
        ids = [t for c in parts for t in c.get("token_ids", ())]
        assert ids == answer["choices"][index]["token_ids"]


def test_logprobs_by_token_id_and_of_the_prompt(client: Client) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "n": 2}
    body |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 0}
    answer = client.ok(URL, body)
    ChatCompletionResponse.model_validate(answer, strict=True)
    for choice in answer["choices"]:
        named = [token["token"] for token in choice["logprobs"]["content"]]
        assert named == [f"token_id:{token}" for token in choice["token_ids"]]
    prompt = answer["prompt_token_ids"]
    told = [None if entry is None else list(entry) for entry in answer["prompt_logprobs"]]
    assert told == [None, *([str(token)] for token in prompt[1:])]
    assert "prompt_logprobs" not in client.ok(URL, {"messages": CHAT, "max_tokens": 1})
    assert client.error(URL, {**body, "stream": True})["param"] == "prompt_logprobs"


def test_messages_reach_the_template() -> None:
    engine = ScriptedEngine(["ok"], tiny_tokenizer(HERMES))
    client = Client(engine)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    seen = {}
    for choice in (None, "none"):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
        assert client.post(URL, body).status_code == 200
        seen[choice] = len(engine.seen[-1][0])
    assert seen["none"] < seen[None], "with tool_choice none the tools are not described"


def test_template_options(engine: Any) -> None:
    client = Client(engine, trust_chat_templates=True)
    broken = {"messages": CHAT, "chat_template": "{{ oops("}
    assert "template" in client.error(URL, broken)["message"]
    template = (
        "{{ messages[-1].content }}{% if enable_thinking %} 1{% endif %}"
        "{% if add_generation_prompt %} 2{% endif %}"
    )
    body = {"messages": [{"role": "user", "content": "Add"}], "chat_template": template}
    count = {}
    for name, fields in {
        "plain": {},
        "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
        "bare": {"add_generation_prompt": False},
        "continued": {"continue_final_message": True},
    }.items():
        tokens = client.ok("/tokenize", {**body, **fields})["tokens"]
        count[name] = client.ok("/detokenize", {"tokens": tokens})["prompt"]
    assert count == {"plain": "Add 2", "thinking": "Add 1 2", "bare": "Add", "continued": "Add"}


def test_a_final_message_is_continued(client: Client) -> None:
    whole = client.ok(URL, {"messages": CHAT})["choices"][0]["message"]
    begun = {"role": "assistant", "content": "<think>\n" + whole["reasoning"][:8]}
    body = {"messages": [*CHAT, begun], "continue_final_message": True}
    message = client.ok(URL, body)["choices"][0]["message"]
    assert whole["reasoning"].endswith(message["reasoning"]) and message["content"] == ANSWER


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_tool_calls(template: str, size: int) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    text = f"<think>hm</think>\n<tool_call>\n{call}\n</tool_call>" if template == HERMES else call
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    engine = ScriptedEngine(pieces, tiny_tokenizer(template))
    client = Client(engine, reasoning_parser="think")
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    choice = client.ok(URL, body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    streamed = joined(client.events(URL, body))
    assert streamed["calls"] == [["get_weather", '{"city": "Rome"}']]
    assert (streamed["content"], streamed["finish_reason"]) == ("", "tool_calls")
    assert streamed["reasoning"] == ("hm" if template == HERMES else "")


def test_finish_reasons_beside_tools() -> None:
    client = Client(engine := ScriptedEngine(["no ", "call"], tiny_tokenizer(HERMES)))
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    assert joined(client.events(URL, body))["finish_reason"] == "stop"
    engine.pieces = ['<tool_call>{"name": "get_weather", "arguments": {"ci']
    engine.finish_reason = "length"
    choice = client.ok(URL, body)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'
    assert joined(client.events(URL, body))["finish_reason"] == "length"


RESPONSES = "/v1/responses"


def response_events(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(RESPONSES, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    for block in answer.text[:-2].split("\n\n"):
        name, data = block.split("\n")
        assert name == "event: " + json.loads(data[6:])["type"]
    events = read_events(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response(client: Client) -> None:
    answer = client.ok(RESPONSES, {"input": SUM})
    ResponseObject.model_validate(answer, strict=True)
    reasoning, message = answer["output"]
    assert answer["status"] == "completed" and message["content"][0]["text"] == ANSWER
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"].endswith("153.")
    events = response_events(client, {"input": [{"role": "user", "content": SUM}]})
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in (
        "output_item.added",
        "content_part.added",
        "content_part.done",
        "output_item.done",
    ):
        assert kinds.count(f"response.{kind}") == 2
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    final = events[-1]["response"]
    ResponseObject.model_validate(final, strict=True)
    assert final["usage"] == {**answer["usage"], "input_tokens_details": {"cached_tokens": 32}}


def test_a_response_comes_in_pieces() -> None:
    pieces = ["The ", "sum", " is ", "15", "3."]
    client = Client(engine := ScriptedEngine(pieces, tiny_tokenizer(HERMES)))
    engine.delay = 0.02  # pieces that nobody has read are joined
    events = response_events(client, {"input": SUM})
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "".join(pieces) and len(deltas) > 1


def test_a_response_that_is_cut(client: Client) -> None:
    answer = client.ok(RESPONSES, {"input": SUM, "max_output_tokens": 4})
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
    events = response_events(client, {"input": SUM, "max_output_tokens": 4})
    assert events[-1]["type"] == "response.incomplete"


def test_a_response_with_calls() -> None:
    text = 'So. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    client = Client(engine := ScriptedEngine(list(text), tiny_tokenizer(HERMES)))
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "get_weather",
                "arguments": '{"city": "Oslo"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        "tools": tools,
    }
    message, call = client.ok(RESPONSES, body)["output"]
    assert message["content"][0]["text"] == "So."
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Rome"}')
    events = response_events(client, body)
    kind = "response.function_call_arguments."
    deltas = [e["delta"] for e in events if e["type"] == kind + "delta"]
    (done,) = [e for e in events if e["type"] == kind + "done"]
    assert "".join(deltas) == done["arguments"] == '{"city": "Rome"}' and len(deltas) > 5
    assert len(engine.seen) == 2
