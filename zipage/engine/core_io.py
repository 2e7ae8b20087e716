"""Input and output of the engine core: token ids and numbers, no text, no tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from zipage.outputs import CompressionRecord, FinishReason, Logprob, RequestMetrics
from zipage.sampling_params import SamplingParams


@dataclass(slots=True)
class ModelInfo:
    """What must be known about the engine to check a request and to decode its answer.

    Attributes:
        max_model_len: most tokens of prompt and answer.
        vocab_size: token ids the model has logits for.
        eos_token_ids: end-of-sequence tokens of the model.
        num_kv_blocks: blocks of the KV pool.
        tokenizer: directory, GGUF file or hub id of the tokenizer; None if there is none.
        default_sampling: sampling options the model asks for in generation_config.json.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int
    tokenizer: str | None
    default_sampling: dict[str, Any]


@dataclass(slots=True)
class EngineRequest:
    """A checked request.

    Attributes:
        request_id: the caller's id; may be reused once the request has ended.
        sequence_ids: one for each of its `n` answers, never reused.
        prompt_token_ids: the prompt, not empty, all in the vocabulary.
        params: how to sample.
        max_tokens: most tokens to generate, resolved against the model's length.
        max_blocks: N_max, most blocks owned once compressed; None for full KV.
        priority: lower runs earlier.
        cache_salt: requests share prefix-cache blocks only with requests of equal salt.
        stream: whether updates with tokens include the metrics so far.
        arrival_time: `time.perf_counter` at submission; Linux processes share that clock.
    """

    request_id: str
    sequence_ids: list[str]
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    max_blocks: int | None = None
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    arrival_time: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class TokenUpdate:
    """What one step did to one answer.

    `prompt_logprobs` are those of the next prompt tokens, if requested; `kv_stats` says what
    compressions kept since the previous update. An update with either may come without a token.
    `finish_reason` is None while the answer runs, else ``stop``, ``length`` or ``error``;
    `stop_reason` is the stop token id of the caller's that ended it, if one did. `metrics` come
    with the end, and with every token if the request streams.
    """

    sequence_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    kv_stats: list[CompressionRecord] | None = None
