"""The openai package talks to the server: sync, async, streams, tools, errors."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.server.conftest import CHAT, SUM, Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from tests.server.test_chat import ANSWER, HERMES, TOOLS


@pytest.fixture
def sdk(live: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="zipage-tiny", messages=CHAT)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.model_extra == {
        "compressions": 0,
        "evicted_tokens": 0,
    }
    text = ""
    with sdk.chat.completions.stream(model="zipage-tiny", messages=CHAT) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == ANSWER


def test_completions_and_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert sdk.models.retrieve(model.id).id == "zipage-tiny"
    whole = sdk.completions.create(
        model=model.id, prompt=SUM, max_tokens=8, logprobs=2, extra_body={"kv_budget": 64}
    )
    stream = sdk.completions.create(model=model.id, prompt=SUM, max_tokens=8, stream=True)
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None


def test_responses(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model="zipage-tiny", input=SUM)
    assert response.output_text == ANSWER
    with sdk.responses.stream(model="zipage-tiny", input=SUM) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert "response.reasoning_text.delta" in kinds and kinds[-1] == "response.completed"


def test_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="zipage-tiny", messages=CHAT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=CHAT)


def test_many_at_once(live: str) -> None:
    """Concurrent streams do not mix."""
    sums = [SUM.replace("74", f"7{i}") for i in range(6)]

    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="none") as sdk:

            async def one(text: str) -> str:
                parts = ""
                stream = await sdk.chat.completions.create(
                    model="zipage-tiny",
                    messages=[{"role": "user", "content": text}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for chunk in stream:
                    for choice in chunk.choices:
                        parts += choice.delta.content or ""
                return parts

            together = await asyncio.gather(*map(one, sums))
            return list(together), [await one(text) for text in sums]

    together, alone = asyncio.run(ask())
    assert together == alone and len(set(alone)) == 6
    assert all("\\boxed{" in text for text in alone)


def test_tools() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    engine = ScriptedEngine(list(text), tiny_tokenizer(HERMES))
    application = Client(engine).app

    async def ask() -> tuple[openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletion]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport) as http:
            sdk = openai.AsyncOpenAI(base_url="http://z/v1", api_key="none", http_client=http)
            arguments = {"model": "zipage-tiny", "messages": CHAT, "tools": TOOLS}
            whole = await sdk.chat.completions.create(**arguments)
            async with sdk.chat.completions.stream(**arguments) as stream:
                return whole, await stream.get_final_completion()

    for answer in asyncio.run(ask()):
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
        assert answer.choices[0].finish_reason == "tool_calls"
