"""Fields shared by completions and chat completions, with vLLM's names where OpenAI has none."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field


class StopAtFirst(FailFast):
    """Report one error of a list, not one for each entry. (`FailFast` itself has no hash, which
    unions need before Python 3.12.)"""

    __hash__ = object.__hash__


TokenIds = Annotated[list[int], StopAtFirst()]
Texts = Annotated[list[str], StopAtFirst()]
#: Most objects in a list; checking a million would hold up all other requests for seconds.
MOST_ITEMS = 16_384


class RequestModel(BaseModel):
    """A request body. Values must have their JSON type; unknown fields are kept for the log."""

    model_config = ConfigDict(strict=True, extra="allow")

    @property
    def unknown_fields(self) -> list[str]:
        """Names of fields that are not part of the API."""
        return sorted(self.model_extra or ())


class StreamOptions(BaseModel):
    """What a stream contains besides its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(BaseModel):
    """A named JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to request structured output."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's way to request structured output; exactly one form is given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # The API's field name is that of a deprecated pydantic method.
    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


class SamplingFields(RequestModel):
    """How to sample, and what to return, see `zipage.SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_ITEMS)] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    kv_budget: int | None = None
    compression: Literal["on", "off"] | None = None
    return_kv_stats: bool | None = None
    kv_stats_layers: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What generated tokens were, and what compression did to the KV caches of all choices."""

    reasoning_tokens: int | None = None
    compressions: int
    evicted_tokens: int


class UsageInfo(BaseModel):
    """Tokens of a request; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(BaseModel):
    """Log-probability of a token at a place in the prompt, by token id as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None


class KVCompression(BaseModel):
    """What one compression kept, see `zipage.outputs.CompressionRecord`; bytes are in base64."""

    num_tokens: int
    length: int
    kept: int
    lists: int
    keepers: list[int]
    layer_positions: list[int]
    seconds: float
    layer_keepers: str | None = None


class KVStats(BaseModel):
    """What happened to the KV cache of a choice (with ``return_kv_stats``).

    In a stream, ``compressions`` has only the new ones.
    """

    compressions: list[KVCompression]
    evicted_tokens: int
    peak_blocks: int


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorInfo
