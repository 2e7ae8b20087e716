"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zipage.server.protocol.sampling import (
    MOST_ITEMS,
    KVStats,
    PromptLogprob,
    RequestModel,
    SamplingFields,
    UsageInfo,
)


class ContentPart(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """Name and arguments (JSON text) of a call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call the model made."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | Annotated[list[ContentPart], Field(max_length=MOST_ITEMS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_ITEMS)] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool the model may use."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str


class NamedToolChoice(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: NamedFunction


class ChatTemplateFields(RequestModel):
    """How a conversation becomes a prompt."""

    model: str | None = None
    messages: Annotated[list[Message], Field(max_length=MOST_ITEMS)]
    tools: Annotated[list[Tool], Field(max_length=MOST_ITEMS)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MOST_ITEMS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatCompletionRequest(ChatTemplateFields, SamplingFields):
    """A conversation to be answered."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TopLogprob(BaseModel):
    """An alternative token at this position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the generated tokens, those of the reasoning included."""

    content: list[TokenLogprob]
    refusal: None = None


class ResponseFunction(BaseModel):
    """Name and arguments (JSON text) of a call."""

    name: str | None = None
    arguments: str


class ResponseToolCall(BaseModel):
    """A call the model made; in a stream, a piece of it."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: ResponseFunction


class ResponseMessage(BaseModel):
    """The model's answer. ``reasoning`` is the newer name of ``reasoning_content``."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ResponseToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    kv_stats: KVStats | None = None


class ChatCompletionResponse(BaseModel):
    """The answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Delta(BaseModel):
    """What a stream event adds to an answer; fields it does not change are absent."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    kv_stats: KVStats | None = None


class ChatCompletionChunk(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = Field(default=None)
