"""litellm, by its generic OpenAI provider and by vLLM's. Needs `make test-clients`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.conftest import CHAT, SUM
from tests.server.test_chat import ANSWER

litellm = pytest.importorskip("litellm", reason="needs tests/server/clients/requirements.txt")
pytestmark = pytest.mark.slow


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, served: str) -> dict[str, Any]:
    model = f"{request.param}/zipage-tiny"
    return {"model": model, "api_base": f"{served}/v1", "api_key": "none", "num_retries": 0}


def test_chat(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=CHAT, **options)
    message = answer.choices[0].message
    assert message.content == ANSWER and message.reasoning_content
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 20


def test_stream(options: dict[str, Any]) -> None:
    stream = litellm.completion(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
    )
    content = reasoning = ""
    counted = 0
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        if getattr(chunk, "usage", None):
            counted = chunk.usage.completion_tokens
    assert content == ANSWER and reasoning and counted > 20


def test_many_at_once(options: dict[str, Any]) -> None:
    async def ask() -> list[Any]:
        sums = [SUM.replace("74", f"7{i}") for i in range(4)]
        chats = [[{"role": "user", "content": text}] for text in sums]
        tasks = [litellm.acompletion(messages=chat, **options) for chat in chats]
        return list(await asyncio.gather(*tasks))

    contents = [answer.choices[0].message.content for answer in asyncio.run(ask())]
    assert contents == [f"The answer is \\boxed{{{149 + i}}}." for i in range(4)]


def test_text_completion(options: dict[str, Any]) -> None:
    if options["model"].startswith("openai"):
        options["model"] = "text-completion-openai/zipage-tiny"
    answer = litellm.text_completion(prompt=SUM, max_tokens=8, temperature=0.0, **options)
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"


def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=CHAT, top_p=7.0, **options)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": SUM * 100}], **options)
