"""What a request returns: vLLM's records, plus what its KV cache went through."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end-of-sequence token, stop token or stop string; length: ``max_tokens`` or the model's
length; abort: cancelled by the caller; error: failed, see ``RequestOutput.error``."""


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the model's probability, before penalties, bias,
            temperature and filters.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: text of the token alone, U+FFFD where it is only part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times and KV cache events of one completion, or of all completions of a request.

    Attributes:
        queue_time: seconds from submission to the first scheduled step.
        time_to_first_token: seconds from submission to the first token; None before it.
        e2e_time: seconds from submission to the end.
        tokens_per_second: decode speed, tokens after the first over the time since the first.
        compressions: how often the cache was compressed.
        evicted_tokens: tokens evicted from each layer and KV head by these compressions.
        peak_blocks: longest block table. (During its first compression a request also holds
            replacements for the blocks it shares through the prefix cache; they do not count.)
        preemptions: how often it lost its blocks, to be recomputed or swapped in again.
        swaps: how often of these its blocks were moved to host memory.
        cached_prompt_tokens: prompt tokens found in the prefix cache when first scheduled.
        arrival_time: when it was submitted, in seconds since the epoch.
        prefill_time: seconds from the first scheduled step to the first token, including
            compressions and preemptions in between; None before it.
        decode_time: seconds from the first token to the last one so far.
        compression_time: seconds its compressions took.
    """

    queue_time: float = 0.0
    time_to_first_token: float | None = None
    e2e_time: float = 0.0
    tokens_per_second: float = 0.0
    compressions: int = 0
    evicted_tokens: int = 0
    peak_blocks: int = 0
    preemptions: int = 0
    swaps: int = 0
    cached_prompt_tokens: int = 0
    arrival_time: float = 0.0
    prefill_time: float | None = None
    decode_time: float = 0.0
    compression_time: float = 0.0

    @classmethod
    def aggregate(cls, completions: Sequence[RequestMetrics]) -> RequestMetrics:
        """Metrics of a request from those of its completions.

        The times are those of the earliest start, first token and latest end, the longest decode
        and all compressions together; speeds and event counts add up; ``peak_blocks`` is the
        largest, as completions may peak at different times; ``cached_prompt_tokens`` is the
        largest, as all completions have the same prompt.
        """
        if not completions:
            return cls()
        first_tokens = [
            part.time_to_first_token for part in completions if part.time_to_first_token is not None
        ]
        prefills = [part.prefill_time for part in completions if part.prefill_time is not None]
        return cls(
            queue_time=min(part.queue_time for part in completions),
            time_to_first_token=min(first_tokens, default=None),
            e2e_time=max(part.e2e_time for part in completions),
            tokens_per_second=sum(part.tokens_per_second for part in completions),
            compressions=sum(part.compressions for part in completions),
            evicted_tokens=sum(part.evicted_tokens for part in completions),
            peak_blocks=max(part.peak_blocks for part in completions),
            preemptions=sum(part.preemptions for part in completions),
            swaps=sum(part.swaps for part in completions),
            cached_prompt_tokens=max(part.cached_prompt_tokens for part in completions),
            arrival_time=min(part.arrival_time for part in completions),
            prefill_time=min(prefills, default=None),
            decode_time=max(part.decode_time for part in completions),
            compression_time=sum(part.compression_time for part in completions),
        )


@dataclass(slots=True)
class Usage:
    """Tokens of a request; the prompt counts once however many completions it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Adds up the total."""
        self.total_tokens = self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class CompressionRecord:
    """What one compression kept of a completion's KV cache.

    Every layer and KV head keeps a list of its own of the tokens it holds, all of the same length.

    Attributes:
        num_tokens: tokens of prompt and answer written to the cache so far.
        length: tokens in each list before the compression.
        kept: tokens in each list after it.
        lists: number of lists, layers times KV heads.
        keepers: for each of the `num_tokens` text positions, how many lists still hold it; 0 means
            that the token is gone.
        layer_positions: for each layer, how many positions at least one of its lists still holds.
        seconds: duration of the compression.
        layer_keepers: with ``kv_stats_layers``, `keepers` of each layer alone, layer after layer,
            a byte each; None without.
    """

    num_tokens: int
    length: int
    kept: int
    lists: int
    keepers: list[int]
    layer_positions: list[int]
    seconds: float
    layer_keepers: bytes | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values: bytes in base64."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.layer_keepers is not None:
            fields["layer_keepers"] = base64.b64encode(self.layer_keepers).decode()
        return fields


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a request.

    Attributes:
        index: which of the n, from 0.
        text: the generated text, without the stop string unless it was requested.
        token_ids: the generated tokens, including the end-of-sequence or stop token if there was
            one.
        cumulative_logprob: sum of the sampled tokens' log-probabilities; None without
            ``logprobs``.
        logprobs: for each generated token, token id to `Logprob`: the ``logprobs`` most likely
            tokens and the sampled one. None without ``logprobs``.
        finish_reason: None while the completion runs.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence
            token and for every other finish reason.
        metrics: times and KV cache events of this completion alone.
        kv_stats: what each compression so far kept. None without ``return_kv_stats``.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    kv_stats: list[CompressionRecord] | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What one request has produced so far.

    Attributes:
        request_id: as given or assigned at submission.
        prompt: the prompt's text; None when token ids were submitted.
        prompt_token_ids: the prompt's tokens.
        outputs: the completions, by index.
        finished: whether all completions have ended.
        metrics: those of all completions combined (`RequestMetrics.aggregate`).
        usage: token counts.
        error: why the request failed; None unless a completion's finish reason is "error".
        prompt_logprobs: for each prompt token, token id to `Logprob`: the token itself and the
            ``prompt_logprobs`` most likely ones; the entry of the first token, which nothing
            predicts, is None. The whole list is None without ``prompt_logprobs``, or until the
            prompt was computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
