"""State the core attaches to a scheduled request: its sampling and what is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from zipage.execution.sampler import SamplingState
from zipage.sampling_params import SamplingParams


@dataclass(eq=False)
class SequenceState:
    """One of the `n` answers of a request.

    Attributes:
        params: the request's sampling parameters.
        sampling: what the choice of its next token depends on.
        stream: whether updates with tokens include the metrics so far.
        output_token_ids: tokens generated so far.
    """

    params: SamplingParams
    sampling: SamplingState
    stream: bool
    output_token_ids: list[int] = field(default_factory=list)
