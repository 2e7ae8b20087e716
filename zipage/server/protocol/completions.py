"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from zipage.server.protocol.sampling import (
    KVStats,
    PromptLogprob,
    SamplingFields,
    StopAtFirst,
    Texts,
    TokenIds,
    UsageInfo,
)
from zipage.server.settings import MOST_PROMPTS


class CompletionRequest(SamplingFields):
    """A prompt, or a batch of them, to be continued."""

    prompt: (
        str
        | Texts
        | TokenIds
        | (Annotated[list[TokenIds], StopAtFirst(), Field(max_length=MOST_PROMPTS)])
    )
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text's tokens; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    kv_stats: KVStats | None = None


class CompletionResponse(BaseModel):
    """Continuations of all prompts, ``n`` for each, in the prompts' order.

    A stream is a sequence of these; usage is null unless it is requested.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
