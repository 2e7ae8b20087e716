"""The engine's numbers, for metrics exporters, progress bars and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

# Needed at run time: statistics are read from messages by the types of their fields.
from zipage.execution.memory import MemoryPlan
from zipage.outputs import FinishReason, RequestMetrics


@dataclass(frozen=True)
class FinishedCompletion:
    """One of the `n` answers of a request that ended.

    Attributes:
        request_id: id of its request.
        index: which of the `n` answers.
        finish_reason: why it ended.
        prompt_tokens: tokens of the prompt, cached ones included.
        generated_tokens: tokens of the answer.
        max_tokens: most tokens it could have generated.
        n: number of answers its request asked for.
        metrics: its times and KV cache events.
    """

    request_id: str
    index: int
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    metrics: RequestMetrics
    n: int = 1


@dataclass
class StepStats:
    """What happened in one engine step. Times are seconds.

    With asynchronous scheduling, the tokens computed are those of the step just queued; the times
    are those of the tokens that became known, which the previous step computed.

    Attributes:
        index: number of the step, from 1; steps in which nothing could run count too.
        seconds: duration of the step.
        num_running: requests computed.
        prefill_tokens: prompt tokens computed, and recomputed ones after a preemption.
        decode_tokens: other tokens computed.
        first_token_seconds: time from submission to the first token, for each completion whose
            first token became known.
        inter_token_seconds: time since the previous token, for each other completion that got one.
        compression_seconds: duration of each compression that ended.
        finished: completions that ended, including those aborted since the previous step.
    """

    index: int = 0
    seconds: float = 0.0
    num_running: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)
    compression_seconds: list[float] = field(default_factory=list)
    finished: list[FinishedCompletion] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.prefill_tokens + self.decode_tokens


@dataclass
class EngineStats:
    """A snapshot: current gauges, and counters since the start. Times are seconds.

    Attributes:
        running: gauge; requests that own KV blocks. An answer of `n` counts as a request here.
        waiting: gauge; requests not admitted yet, or preempted.
        compressing: gauge; those of `running` whose compression is in flight.
        swapped: gauge; those of `waiting` whose cache lies in host memory.
        blocks_total: gauge; blocks of the KV pool, each of which is owned, cached or free.
        blocks_owned: gauge; blocks owned by requests.
        blocks_cached: gauge; unowned blocks kept for prefix hits; evicted when blocks run short.
        blocks_free: gauge; blocks that hold nothing.
        query_slots_total: gauge; query slots of the pool.
        query_slots_in_use: gauge; query slots leased to requests.
        steps: model steps; those that only waited for a compression are left out.
        prefill_tokens: prompt tokens computed, and tokens recomputed after a preemption; without
            those found in the prefix cache.
        generated_tokens: tokens sampled.
        compressions: finished compressions.
        evicted_tokens: tokens evicted from each layer and KV head.
        preemptions_recompute: requests that lost their blocks, to be computed again.
        preemptions_swap: requests whose cache was moved to host memory.
        stalls_resolved: preemptions because no request could make progress.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: those of them that were found.
        step_seconds: time in engine steps.
        forward_seconds: time in model forward passes and sampling; for steps scheduled ahead on
            CUDA, only the time to queue them.
        compression_seconds: time in compressions, measured on the device where they run on CUDA
            concurrently with decoding.
        running_sum: requests computed, summed over the steps.
        blocks_owned_sum: `blocks_owned`, summed over the steps.
        requests_submitted: accepted requests, however many answers each asks for.
        requests_refused: requests refused at submission.
        prompt_tokens: prompt tokens of accepted requests, once for all `n` answers.
        completions_stop: answers ended by a stop token, stop string or end-of-sequence token.
        completions_length: answers ended by ``max_tokens`` or the model's length.
        completions_abort: answers cancelled.
        completions_error: answers that failed.
        engine_restarts: engine processes started to replace one that died.
        last_step: what happened in the last step.
        memory: what the device's memory is for, planned at start; None on the CPU.
    """

    running: int = 0
    waiting: int = 0
    compressing: int = 0
    swapped: int = 0
    blocks_total: int = 0
    blocks_owned: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    query_slots_total: int = 0
    query_slots_in_use: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    compressions: int = 0
    evicted_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    stalls_resolved: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    compression_seconds: float = 0.0
    running_sum: int = 0
    blocks_owned_sum: int = 0
    requests_submitted: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    completions_stop: int = 0
    completions_length: int = 0
    completions_abort: int = 0
    completions_error: int = 0
    engine_restarts: int = 0
    last_step: StepStats = field(default_factory=StepStats)
    memory: MemoryPlan | None = None

    @property
    def preemptions(self) -> int:
        """Preemptions of both kinds."""
        return self.preemptions_recompute + self.preemptions_swap

    @property
    def mean_running(self) -> float:
        """Requests computed per step, on average."""
        return self.running_sum / self.steps if self.steps else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the KV pool that requests own, from 0 to 1."""
        return self.blocks_owned / self.blocks_total if self.blocks_total else 0.0

    def completions(self, reason: FinishReason) -> int:
        """Answers that ended for this reason."""
        count: int = getattr(self, f"completions_{reason}")
        return count

    def add_counters(self, before: EngineStats) -> None:
        """Add the counters of an engine that ended, to continue from them."""
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(before, name))


_GAUGES = {
    *("running", "waiting", "compressing", "swapped"),
    *("blocks_total", "blocks_owned", "blocks_cached", "blocks_free"),
    *("query_slots_total", "query_slots_in_use"),
}
_COUNTERS = [
    f.name for f in fields(EngineStats) if f.type in ("int", "float") and f.name not in _GAUGES
]
