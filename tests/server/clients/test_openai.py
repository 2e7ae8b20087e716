"""The openai package talks to a server process, as users' programs do."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.server.conftest import CHAT, SUM
from tests.server.test_chat import ANSWER, TOOLS
from zipage.sampling_params import SamplingParams

structured = pytest.mark.skipif(
    "structured_outputs" not in SamplingParams.__dataclass_fields__,
    reason="this engine has no structured output",
)


@pytest.fixture
def sdk(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_every_api(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model="zipage-tiny", messages=CHAT)
    assert chat.choices[0].message.content == ANSWER
    chunks = sdk.chat.completions.create(model="zipage-tiny", messages=CHAT, stream=True)
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == ANSWER and len(deltas) > 5
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


@structured
def test_structured_output(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    answer = sdk.chat.completions.create(
        model="zipage-tiny",
        messages=CHAT,
        max_tokens=600,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    if answer.choices[0].finish_reason == "stop":
        assert set(json.loads(answer.choices[0].message.content or "")) == {"sum"}
    chosen = sdk.chat.completions.create(
        model="zipage-tiny",
        messages=CHAT,
        extra_body={"structured_outputs": {"choice": ["153", "154"]}},
    )
    assert chosen.choices[0].message.content in ("153", "154")


@structured
def test_a_tool_that_must_be_called(sdk: openai.OpenAI) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "answer",
                "parameters": {
                    "type": "object",
                    "properties": {"sum": {"enum": ["153", "154"]}},
                    "required": ["sum"],
                    "additionalProperties": False,
                },
            },
        },
        *TOOLS,
    ]
    choice = {"type": "function", "function": {"name": "answer"}}
    arguments = {"model": "zipage-tiny", "messages": CHAT, "tools": tools, "tool_choice": choice}
    whole = sdk.chat.completions.create(**arguments)
    with sdk.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion()
    for completion in (whole, streamed):
        (call,) = completion.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "answer"
        assert json.loads(call.function.arguments)["sum"] in ("153", "154")
