"""Traces of random schedules with aborts, failures and late starts are valid."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small_model import VOCAB_SIZE, make_small_llm
from tests.engine.workload import assert_empty, greedy
from tests.observe.chrome_format import check_trace
from zipage.observe.trace import REQUESTS, TraceRecorder


def break_something(llm: Any, rng: random.Random) -> None:
    """Let some compressions, swaps and steps fail."""
    runner = llm.engine.core.runner
    for method in rng.sample(("compress", "swap_out", "swap_in", "execute", "launch"), 2):
        inner = getattr(runner, method)

        def failing(*args: Any, inner: Any = inner) -> Any:
            if rng.random() < 0.05:
                raise RuntimeError("injected")
            return inner(*args)

        setattr(runner, method, failing)


@pytest.mark.parametrize("seed", range(24))
def test_random_traces_are_valid(small_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_kv_blocks": rng.choice((12, 16, 40)),
        "num_query_slots": rng.choice((1, 2, 8)),
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_num_batched_tokens": rng.choice((16, 64)),
        "admission": rng.choice(("optimistic", "bounded")),
        "bounded_prefill": rng.random() < 0.3,
        "async_compression": rng.random() < 0.5,
        "async_scheduling": rng.random() < 0.5,
    }
    recorder = TraceRecorder()
    with make_small_llm(small_model, **options) as llm:
        engine = llm.engine
        if rng.random() < 0.5:
            break_something(llm, rng)
        first_traced = rng.choice((0, 0, 3))
        live: list[str] = []
        traced = 0
        for number in range(10):
            if number == first_traced:
                engine.start_trace(recorder)
            prompt = [rng.randrange(10, VOCAB_SIZE) for _ in range(rng.choice((3, 20, 70)))]
            full = rng.random() < 0.3
            params = greedy(
                rng.choice((1, 2, 40, 90)),
                n=rng.choice((1, 1, 1, 3)),
                compression="off" if full else None,
            )
            live.append(engine.add_request(prompt, params, priority=rng.choice((0, 0, -1))))
            traced += params.n if number >= first_traced else 0
            for _ in range(rng.choice((0, 1, 10))):
                engine.step()
            if rng.random() < 0.2:
                engine.abort(rng.choice(live))
        check_trace(recorder.to_dict())
        while engine.has_unfinished:
            engine.step()
        assert_empty(llm)
    trace = recorder.to_dict()
    events = check_trace(trace)
    mine = [e for e in events if e["pid"] == REQUESTS]
    for tid in range(1, traced + 1):
        names = [e["name"] for e in mine if e["tid"] == tid]
        assert names.count("submitted") == names.count("finished") == 1
        assert names.count("admitted") <= 1 and names.count("first token") <= 1
        assert names.count("resumed") <= names.count("preempted")
        assert names.count("compressed") <= names.count("compressing")
        if "decode" in names:
            assert "first token" in names and "admitted" in names
    assert {e["tid"] for e in mine} == set(range(1, traced + 1))
