"""The offline benchmark: all requests at once, timed to the last token."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zipage.bench.roofline import Roofline, measure_copy_bandwidth, weight_bytes_per_step
from zipage.bench.workloads import BenchRequest
from zipage.engine.request import RequestStatus
from zipage.engine.stats import EngineStats
from zipage.errors import ConfigError, ZipageError
from zipage.evals.machine import describe_machine
from zipage.llm import LLM
from zipage.sampling_params import SamplingParams

#: Called after every step with the stats and the number of requests that have ended.
Watcher = Callable[[EngineStats, int], None]

_MEMORY_INTERVAL = 0.1


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds from the end of one step to the end of the next."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class RunResult:
    """One run of a workload.

    Attributes:
        mode: ``zipage`` or ``full`` (full KV in the same pool).
        wall_seconds: from the first submission to the last token.
        prefill_tokens: prompt tokens computed, and tokens recomputed after a preemption.
        tokens_per_second: generated tokens over `wall_seconds`.
        mean_running: requests computed per step, on average.
        compression_share: time spent in compressions over `wall_seconds`; asynchronous ones
            overlap with decoding.
        pool_blocks, pool_blocks_mean, pool_blocks_peak: size of the pool and blocks in use.
        peak_memory_bytes: peak resident host memory of the process, or peak CUDA memory
            allocated, during the run.
        roofline: the bytes of the same work and the measured bandwidth.
    """

    mode: str
    wall_seconds: float
    prefill_tokens: int
    generated_tokens: int
    tokens_per_second: float
    steps: int
    step_ms: StepTimes
    mean_running: float
    preemptions_recompute: int
    preemptions_swap: int
    compressions: int
    evicted_tokens: int
    compression_share: float
    pool_blocks: int
    pool_blocks_mean: float
    pool_blocks_peak: int
    peak_memory_bytes: int
    roofline: Roofline

    @property
    def roofline_share(self) -> float:
        """The roofline's time over the time the run took."""
        return self.roofline.seconds / self.wall_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        record = asdict(self)
        record["roofline"] |= {
            "total_bytes": self.roofline.total_bytes,
            "seconds": self.roofline.seconds,
            "share": self.roofline_share,
        }
        return record


def run_offline(
    llm: LLM,
    requests: Sequence[BenchRequest],
    repeats: int = 1,
    compare_full: bool = False,
    watch: Watcher | None = None,
) -> list[RunResult]:
    """Run a workload; with `compare_full`, each run with compression is followed by one without.

    All runs share one engine and one pool. The prefix cache is not shared between runs. A short
    request runs first, so that no run pays one-time costs.

    Args:
        llm: the engine, with nothing else to do.
        requests: the workload.
        repeats: runs of each mode.
        compare_full: run full KV too.
        watch: called after every step.

    Raises:
        ConfigError: `repeats` is illegal, or there is nothing to compare.
        RequestError: a request can't be run by this engine.
        ZipageError: a request failed.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} must be at least 1")
    budget = llm.config.kv_budget if llm.config.compresses else None
    if compare_full and budget is None:
        raise ConfigError(
            "compare_full needs an engine that compresses: give a kv_budget, and a compression "
            "policy other than 'full'"
        )
    modes = ["zipage" if budget is not None else "full"] + ["full"] * compare_full
    bandwidth = measure_copy_bandwidth(llm.engine.core.runner.device)
    warm_up(llm)
    return [
        _Run(llm, mode, f"{mode} {i}", bandwidth, watch).run(requests)
        for i in range(repeats)
        for mode in modes
    ]


def median_result(results: Sequence[RunResult], mode: str) -> RunResult | None:
    """The run with the median speed of a mode; of two, the slower one."""
    ordered = sorted((r for r in results if r.mode == mode), key=lambda r: r.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def speed_ratio(results: Sequence[RunResult]) -> float | None:
    """Median over the pairs of runs of tokens/s with compression over tokens/s without."""
    ratios = [
        mine.tokens_per_second / full.tokens_per_second
        for mine, full in zip(results[::2], results[1::2], strict=False)
        if (mine.mode, full.mode) == ("zipage", "full")
    ]
    return statistics.median(ratios) if ratios else None


def describe_setting(llm: LLM) -> dict[str, Any]:
    """The context of a number: the machine, the versions and the engine's choices."""
    runner = llm.engine.core.runner
    weights = ", fp8 weights" if runner.config.quantization == "fp8" else ""
    return {
        **describe_machine(str(runner.device)),
        "dtype": str(runner.model.dtype).removeprefix("torch.") + weights,
        "kv_cache_dtype": str(runner.cache.kv.dtype).removeprefix("torch."),
        "attention_backend": runner.backend.name,
    }


class _Run:
    """Submits a workload, steps the engine until it ends, and takes the measurements."""

    def __init__(
        self, llm: LLM, mode: str, cache_salt: str, bandwidth: float, watch: Watcher | None
    ) -> None:
        self.engine = llm.engine
        self.core = llm.engine.core
        self.mode = mode
        self.cache_salt = cache_salt
        self.bandwidth = bandwidth
        self.watch = watch
        self.device = self.core.runner.device
        self.step_seconds: list[float] = []
        self.peak_blocks = 0
        self.peak_memory = 0
        self.kv_tokens_read = 0
        self._next_memory = 0.0

    def run(self, requests: Sequence[BenchRequest]) -> RunResult:
        """Carry out the run."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        before = self.core.stats()
        started = time.perf_counter()
        ids = set()
        try:
            for request in requests:
                ids.add(self._submit(request))
            self._step_to_the_end(ids, started)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        wall = time.perf_counter() - started
        result = self._result(before, self.core.stats(), wall)
        expected = sum(request.output_len for request in requests)
        if result.generated_tokens != expected:
            raise ZipageError(
                f"the run generated {result.generated_tokens} tokens instead of {expected}"
            )
        return result

    def _submit(self, request: BenchRequest) -> str:
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=self.engine.has_tokenizer,
            max_tokens=request.output_len,
            compression="off" if self.mode == "full" else None,
        )
        return self.engine.add_request(request.prompt_token_ids, params, cache_salt=self.cache_salt)

    def _step_to_the_end(self, left: set[str], started: float) -> None:
        total, steps, last = len(left), self.core.stats().steps, started
        while left:
            for output in self.engine.step():
                if output.error is not None:
                    raise ZipageError(f"{output.request_id} failed: {output.error}")
                left.discard(output.request_id)
            now = time.perf_counter()
            stats = self.core.stats()
            if stats.steps != steps:
                # A call that only waited for a compression counts as part of the next step.
                self.step_seconds.append(now - last)
                steps, last = stats.steps, now
                self._observe(stats, now)
            if self.watch is not None:
                self.watch(stats, total - len(left))

    def _observe(self, stats: EngineStats, now: float) -> None:
        self.peak_blocks = max(self.peak_blocks, stats.blocks_owned)
        # Requests that ended in this step are missed: one step of each request.
        self.kv_tokens_read += sum(
            request.length
            for request in self.core.scheduler.running
            if request.status is RequestStatus.RUNNING
        )
        if now >= self._next_memory and self.device.type == "cpu":
            self._next_memory = now + _MEMORY_INTERVAL
            self.peak_memory = max(self.peak_memory, _resident_bytes())

    def _result(self, before: EngineStats, after: EngineStats, wall: float) -> RunResult:
        steps = after.steps - before.steps
        spec = self.core.runner.cache.spec
        generated = after.generated_tokens - before.generated_tokens
        evicted = after.evicted_tokens - before.evicted_tokens
        if self.device.type == "cuda":
            self.peak_memory = torch.cuda.max_memory_allocated(self.device)
        return RunResult(
            mode=self.mode,
            wall_seconds=wall,
            prefill_tokens=after.prefill_tokens - before.prefill_tokens,
            generated_tokens=generated,
            tokens_per_second=generated / wall,
            steps=steps,
            step_ms=_step_times(self.step_seconds),
            mean_running=(after.running_sum - before.running_sum) / steps,
            preemptions_recompute=after.preemptions_recompute - before.preemptions_recompute,
            preemptions_swap=after.preemptions_swap - before.preemptions_swap,
            compressions=after.compressions - before.compressions,
            evicted_tokens=evicted,
            compression_share=(after.compression_seconds - before.compression_seconds) / wall,
            pool_blocks=after.blocks_total,
            pool_blocks_mean=(after.blocks_owned_sum - before.blocks_owned_sum) / steps,
            pool_blocks_peak=self.peak_blocks,
            peak_memory_bytes=self.peak_memory,
            roofline=Roofline(
                weight_bytes=steps * weight_bytes_per_step(self.core.runner.model),
                kv_read_bytes=self.kv_tokens_read * spec.bytes_per_token,
                kv_moved_bytes=2 * evicted * spec.bytes_per_token,
                bandwidth=self.bandwidth,
            ),
        )


def _step_times(seconds: Sequence[float]) -> StepTimes:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return StepTimes(
        mean=1000 * statistics.fmean(ordered),
        p50=1000 * ordered[last // 2],
        p99=1000 * ordered[round(0.99 * last)],
    )


def warm_up(llm: LLM) -> None:
    """Load the tokenizer, if any, and run every kind of step once."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=llm.engine.has_tokenizer,
        max_tokens=4,
        compression="off",
    )
    llm.generate([[1, 2, 3]] * 2, params)


def _resident_bytes() -> int:
    """Resident memory of the process; its peak so far if the current value isn't available."""
    try:
        with open("/proc/self/statm") as fields:
            return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
