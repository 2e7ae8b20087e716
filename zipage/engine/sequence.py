"""What the engine attaches to a scheduled request: sampling state and generated text."""

from __future__ import annotations

from dataclasses import dataclass

from zipage.engine.detokenizer import IncrementalDetokenizer
from zipage.execution.sampler import SamplingState
from zipage.outputs import CompressionRecord, FinishReason, Logprob
from zipage.sampling_params import SamplingParams


@dataclass(eq=False)
class SequenceState:
    """One of the `n` answers of a request.

    Attributes:
        group_id: id of the request it belongs to.
        params: the request's sampling parameters.
        sampling: random generator and penalty state.
        output_token_ids: tokens generated so far.
        num_reported: how many of them went through the detokenizer and the checks of text.
        index: which of the `n` answers.
        detokenizer: present when somebody reads the text as it is generated, or a stop string has
            to be found; otherwise the text is decoded once at the end.
        kv_stats: what each compression kept, if that is reported.
    """

    group_id: str
    params: SamplingParams
    sampling: SamplingState
    output_token_ids: list[int]
    index: int
    detokenizer: IncrementalDetokenizer | None
    num_reported: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    kv_stats: list[CompressionRecord] | None = None
