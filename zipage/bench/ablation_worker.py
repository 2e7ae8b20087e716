"""The process in which the cells of an ablation run."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from zipage.bench.ablation_work import PROBLEMS, Work
from zipage.bench.workloads import check_lengths
from zipage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from zipage.engine.stats import EngineStats
    from zipage.evals.problems import Problem
    from zipage.llm import LLM

#: Points of a curve of generated tokens over time.
_CURVE_POINTS = 200
#: A worker that still holds more CUDA memory than this after its engine is gone is not reused.
_MOST_LEFT = 1 << 30


def serve(pipe: Connection) -> None:
    """Run measurements until the other end is closed, a measurement fails or memory leaks.

    Args:
        pipe: receives (engine options, `Work`, seconds or None), sends rows.
    """
    # The parent handles Ctrl-C and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    usable = True
    while usable:
        try:
            options, work, seconds = pipe.recv()
        except EOFError:
            return
        try:
            row = measure(options, work, seconds)
            usable = _memory_left() <= _MOST_LEFT
        except Exception as error:
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            usable = False
        pipe.send(row)


def _end_with_parent() -> None:
    """End with the parent: if killed, it can't end this process, which may hold a GPU."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def measure(options: Mapping[str, Any], work: Work, seconds: float | None) -> dict[str, Any]:
    """Run the work on a new engine.

    Args:
        options: engine options.
        work: what it does; all requests are submitted at once.
        seconds: time limit, start-up included, after which it is cut off; None for no limit.

    Returns:
        ``status`` (``ok`` or ``cut``), times and counters of what was done, ``curve`` of
        [seconds, generated tokens], and for problems that were all answered ``right`` and
        ``total``.
    """
    started = time.monotonic()
    from zipage.bench.offline import describe_setting, warm_up
    from zipage.execution.memory import pool_bytes
    from zipage.llm import LLM

    own = dict(options)
    with LLM(own.pop("model", None), **own) as llm:
        warm_up(llm)
        prompts, params, problems = _make_requests(llm, work)
        before = llm.stats()
        ready = time.monotonic()
        watch = _Watch(before, None if seconds is None else started + seconds)
        begun, cpu = time.perf_counter(), time.process_time()
        outputs = None
        try:
            outputs = llm.generate(prompts, params, on_step=watch)
            wall = time.perf_counter() - begun
        except _OutOfTime:
            wall = watch.curve[-1][0]
        row = {
            "status": "cut" if outputs is None else "ok",
            "start_seconds": round(ready - started, 3),
            **_numbers(before, watch.stats, wall),
            "cpu_seconds": round(time.process_time() - cpu, 3),
            "budget": llm.config.kv_budget if llm.config.compresses else None,
            "kv_bytes": pool_bytes(llm.engine.core.runner.cache.spec),
            "curve": watch.thinned(),
            "machine": describe_setting(llm),
        }
    if outputs is not None and problems:
        from zipage.evals.problems import is_correct

        row["right"] = sum(
            is_correct(answer.text, problem.answer)
            for output, problem in zip(outputs, problems, strict=True)
            for answer in output.outputs
        )
        row["total"] = work.samples * len(problems)
    failed = [output.error for output in outputs or () if output.error]
    if failed:
        row |= {"status": "failed", "error": f"{len(failed)} requests failed: {failed[0]}"}
    return row


def _make_requests(llm: LLM, work: Work) -> tuple[list[Any], list[SamplingParams], list[Problem]]:
    if work.workload == PROBLEMS:
        problems = work.problems()
        prompts = llm.chat_prompts([[{"role": "user", "content": p.prompt}] for p in problems])
        limit = work.reply_limit()
        params = SamplingParams(temperature=0.0, max_tokens=limit, n=work.samples)
        return prompts, [params] * len(prompts), problems
    requests = work.requests(llm.engine.vocab_size)
    check_lengths(requests, llm.engine.max_model_len, work.scale)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=llm.engine.has_tokenizer)
    return (
        [r.prompt_token_ids for r in requests],
        [replace(greedy, max_tokens=r.output_len) for r in requests],
        [],
    )


class _OutOfTime(Exception):
    """The cell's time is up."""


class _Watch:
    """Watches a run step by step, and ends it when its time is up."""

    def __init__(self, before: EngineStats, deadline: float | None) -> None:
        self.stats = before
        self.curve: list[tuple[float, int]] = []
        self._before = before
        self._deadline = deadline
        self._begun = time.perf_counter()

    def __call__(self, stats: EngineStats) -> None:
        now = time.perf_counter()
        self.stats = stats
        tokens = stats.generated_tokens - self._before.generated_tokens
        self.curve.append((now - self._begun, tokens))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _OutOfTime

    def thinned(self) -> list[tuple[float, int]]:
        """At most `_CURVE_POINTS` points of the curve, including the last."""
        every = -(-len(self.curve) // _CURVE_POINTS) or 1
        points = self.curve[::-1][::every][::-1]
        return [(round(seconds, 4), tokens) for seconds, tokens in points]


def _numbers(before: EngineStats, after: EngineStats, wall: float) -> dict[str, Any]:
    def gained(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    steps = gained("steps")
    looked_up = gained("prefix_cache_queries")
    return {
        "wall_seconds": round(wall, 4),
        "generated_tokens": gained("generated_tokens"),
        "prefill_tokens": gained("prefill_tokens"),
        "tokens_per_second": gained("generated_tokens") / wall,
        "steps": steps,
        "ms_per_step": 1000 * wall / steps,
        "mean_running": gained("running_sum") / steps,
        "compressions": gained("compressions"),
        "compression_share": gained("compression_seconds") / wall,
        "preemptions_recompute": gained("preemptions_recompute"),
        "preemptions_swap": gained("preemptions_swap"),
        "prefix_hit_rate": gained("prefix_cache_hits") / looked_up if looked_up else 0.0,
        "pool_blocks": after.blocks_total,
    }


def _memory_left() -> int:
    """CUDA memory that this process still reserves after releasing everything unused."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
