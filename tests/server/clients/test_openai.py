"""The openai package talks to a server process, as users' programs do."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.server.conftest import CHAT, SUM
from tests.server.test_chat import ANSWER, TOOLS


@pytest.fixture
def sdk(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_every_api(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model="zipage-tiny", messages=CHAT)
    assert chat.choices[0].message.content == ANSWER
    chunks = sdk.chat.completions.create(model="zipage-tiny", messages=CHAT, stream=True)
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == ANSWER and len(deltas) > 1
    assert sdk.responses.create(model="zipage-tiny", input=SUM).output_text == ANSWER
    text = sdk.completions.create(model="zipage-tiny", prompt=SUM, max_tokens=5)
    assert text.usage is not None and text.usage.completion_tokens == 5
    raw = sdk.chat.completions.with_raw_response.create(model="zipage-tiny", messages=CHAT)
    assert raw.headers["x-request-id"] in raw.parse().id


def test_async_streams_that_are_left_early(served: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served}/v1", api_key="none") as sdk:

            async def one(is_left: bool) -> str:
                text = ""
                async with await sdk.chat.completions.create(
                    model="zipage-tiny", messages=CHAT, stream=True
                ) as stream:
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                        if is_left:
                            break
                return text

            return list(await asyncio.gather(*[one(i % 2 == 1) for i in range(8)]))

    texts = asyncio.run(ask())
    assert texts[::2] == [ANSWER] * 4 and texts[1::2] == [""] * 4


def test_timeouts_of_the_client(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        sdk.with_options(timeout=0.2).completions.create(
            model="zipage-tiny", prompt=SUM, max_tokens=1900, extra_body={"ignore_eos": True}
        )
    assert sdk.chat.completions.create(model="zipage-tiny", messages=CHAT).choices


def test_structured_output(sdk: openai.OpenAI) -> None:
    """The embedded model's vocabulary has digits and braces, but no quotation marks."""
    schema = {"type": "integer", "minimum": 1000, "maximum": 1999}
    named = {"name": "sum", "schema": schema, "strict": True}
    arguments = {
        "model": "zipage-tiny",
        "messages": CHAT,
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    answer = sdk.chat.completions.create(**arguments)
    message = answer.choices[0].message
    assert 1000 <= json.loads(message.content or "") <= 1999
    assert message.reasoning_content, "the form is that of what follows the reasoning"
    chunks = sdk.chat.completions.create(stream=True, **arguments)
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == message.content
    response = sdk.responses.create(
        model="zipage-tiny",
        input=SUM,
        text={"format": {"type": "json_schema", **named}},
    )
    assert response.output_text == message.content
    chosen = sdk.chat.completions.create(
        model="zipage-tiny",
        messages=CHAT,
        extra_body={"structured_outputs": {"choice": ["154", "155"]}},
    )
    assert chosen.choices[0].message.content in ("154", "155")


def test_a_tool_that_must_be_called(sdk: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    arguments = {
        "model": "zipage-tiny",
        "messages": CHAT,
        "tools": [
            {"type": "function", "function": {"name": "ring", "parameters": parameters}},
            *TOOLS,
        ],
        "tool_choice": {"type": "function", "function": {"name": "ring"}},
    }
    whole = sdk.chat.completions.create(**arguments)
    with sdk.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion()
    for completion in (whole, streamed):
        (call,) = completion.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "ring"
        assert json.loads(call.function.arguments) == {}
        assert completion.choices[0].finish_reason == "tool_calls"
