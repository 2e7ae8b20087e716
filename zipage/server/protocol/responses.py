"""/v1/responses, its text features."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zipage.server.protocol.sampling import MOST_ITEMS, SamplingFields


class InputPart(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class InputItem(BaseModel):
    """A message, an earlier call, its output, or earlier reasoning."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | Annotated[list[InputPart], Field(max_length=MOST_ITEMS)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[InputPart], Field(max_length=MOST_ITEMS)] | None = None


class FunctionTool(BaseModel):
    """A function the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionChoice(BaseModel):
    """The function that must be called."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """How the text is structured."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """Options of the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """Options of the reasoning."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None


class ResponsesRequest(SamplingFields):
    """Something to respond to. Nothing is stored: conversations are sent whole."""

    input: str | Annotated[list[InputItem], Field(max_length=MOST_ITEMS)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_ITEMS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputPart(BaseModel):
    """Text of the answer or of the reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OutputItem(BaseModel):
    """A message, a call or reasoning."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(BaseModel):
    """Where input tokens came from."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """What generated tokens were, and what compression did to the KV cache."""

    reasoning_tokens: int
    compressions: int
    evicted_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[FunctionTool]
    usage: ResponseUsage | None = None
