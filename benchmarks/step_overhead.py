"""Time of an engine step outside the model, at a given number of running requests.

Every part of a step is timed on its own while all requests decode: batch building, forward pass,
output head, sampling, and what is left, which is scheduling, updates and reporting. The
forward pass and the head are the model; the rest is the overhead.

    python benchmarks/step_overhead.py --requests 64
    python benchmarks/step_overhead.py --profile    # and where in the code it goes
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zipage import LLM, SamplingParams
from zipage.bench.workloads import make_workload
from zipage.evals.machine import describe_machine


class PartTimer:
    """Adds up the time spent in some methods of objects."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, part: str, owner: Any, method: str) -> None:
        """Time every call of ``owner.method`` as `part`."""
        call: Callable[..., Any] = getattr(owner, method)
        self.seconds[part] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """The times since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each part in each measured step."""
    engine, runner = llm.engine, llm.engine.core.runner
    params = SamplingParams(
        temperature=0.0 if args.greedy else 0.8,
        top_p=1.0 if args.greedy else 0.95,
        ignore_eos=True,
        max_tokens=args.steps + args.warmup + 8,
    )
    for request in make_workload("tiny", engine.vocab_size, args.requests):
        engine.add_request(request.prompt_token_ids[: args.prompt_len], params, stream=args.stream)
    while engine.core.scheduler.waiting or any(
        r.num_pending > 1 for r in engine.core.scheduler.running
    ):
        engine.step()
    for _ in range(args.warmup):
        engine.step()
    timer = PartTimer()
    timer.watch("batch building", runner, "_build")
    timer.watch("forward pass", runner.model, "forward")
    timer.watch("output head", runner.model, "compute_logits")
    timer.watch("sampling", runner.sampler, "sample")
    profile = cProfile.Profile() if args.profile else None
    parts: dict[str, list[float]] = {}
    for _ in range(args.steps):
        timer.take()
        if profile:
            profile.enable()
        started = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - started
        if profile:
            profile.disable()
        step = timer.take()
        step["schedule, update, report"] = whole - sum(step.values())
        step["whole step"] = whole
        for part, seconds in step.items():
            parts.setdefault(part, []).append(1000 * seconds)
    assert engine.stats().running == args.requests, "some requests were not running"
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return parts


def main() -> None:
    """Measure and print medians per step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64, help="running requests")
    parser.add_argument("--prompt-len", type=int, default=64, help="most prompt tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-budget", type=int, default=512)
    parser.add_argument("--sample", dest="greedy", action="store_false", help="not greedy")
    parser.add_argument("--stream", action="store_true", help="every request streams its text")
    parser.add_argument("--trace", action="store_true", help="every request is traced")
    parser.add_argument("--profile", action="store_true", help="print cProfile's view")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    args = parser.parse_args()
    options = {"kv_budget": args.kv_budget, "max_num_seqs": args.requests, "dtype": args.dtype}
    with LLM(**options) as llm, llm.trace() if args.trace else contextlib.nullcontext():
        parts = measure(llm, args)
    medians = {part: statistics.median(times) for part, times in parts.items()}
    overhead = [
        sum(step)
        for step in zip(
            *(
                times
                for part, times in parts.items()
                if part not in ("forward pass", "output head", "whole step")
            ),
            strict=True,
        )
    ]
    medians["outside the model"] = statistics.median(overhead)
    machine = describe_machine()
    print(
        f"{machine['device']}, {machine['threads']} threads: medians of {args.steps} steps with "
        f"{args.requests} running requests"
    )
    for part, milliseconds in medians.items():
        print(f"  {part:<26}{milliseconds:8.3f} ms")
    if args.json is not None:
        record = {"machine": machine, "requests": args.requests, "median_ms": medians}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
