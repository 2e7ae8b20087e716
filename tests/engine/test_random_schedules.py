"""Random schedules on the real model, token for token (design invariants 1 to 6)."""

from __future__ import annotations

import os
import random

import pytest

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, run_alone
from zipage import LLM, SamplingParams

SCHEDULES = int(os.environ.get("ZIPAGE_SCHEDULES", "100"))
GROUPS = 10


@pytest.fixture(scope="module")
def catalogue() -> list[list[int]]:
    with make_llm() as llm:
        found = [prompt_ids(llm, steps, seed) for seed, steps in enumerate((1, 2, 4, 7, 11, 16))]
    # Exact multiples of the block size, prefixes of one another, and their neighbours.
    long = found[-1]
    return [*found, long[:96], long[:97], long[:95], long[:64], found[0] + found[1]]


def _options(rng: random.Random) -> dict[str, object]:
    block_size = rng.choice([16, 16, 32])
    return {
        "block_size": block_size,
        "kv_budget": block_size * rng.choice([1, 2, 4]),
        "window": rng.choice([8, 16]),
        "num_query_slots": rng.choice([1, 2, 8]),
        "compaction": rng.choice(["holes", "stable"]),
        "bounded_prefill": rng.random() < 0.3,
        "compression": rng.choice(["zipage", "zipage", "zipage-paper", "rkv", "streaming"]),
    }


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedule_equals_solo_runs(group: int, catalogue: list[list[int]]) -> None:
    """Requests arriving at random, some aborted, in random pools; each equals its solo run."""
    rng = random.Random(1000 + group)
    shared = _options(rng)
    solo: dict[tuple[int, int, bool], list[int]] = {}
    for _ in range(-(-SCHEDULES // GROUPS)):
        count = rng.randint(2, 7)
        picks = [
            (rng.randrange(len(catalogue)), rng.choice([1, 5, 30, 70]), rng.random() < 0.25)
            for _ in range(count)
        ]
        missing = [p for p in dict.fromkeys(picks) if p not in solo]
        params = [greedy(n, compression="off" if off else None) for _, n, off in missing]
        runs = run_alone([catalogue[i] for i, _, _ in missing], params, **shared)
        solo.update(zip(missing, runs, strict=True))
        b = int(shared["block_size"])  # type: ignore[call-overload]
        largest = max(-(-(len(catalogue[i]) + n) // b) for i, n, _ in picks)
        largest = max(largest, int(shared["kv_budget"]) // b + 1)  # type: ignore[call-overload]
        options = dict(
            shared,
            num_kv_blocks=largest + rng.choice([0, 1, 3, 8, 40]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([7, 32, 256]),
            admission=rng.choice(["bounded", "optimistic"]),
            enable_prefix_caching=rng.random() < 0.7,
            async_compression=rng.random() < 0.5,
        )
        with make_llm(**options) as llm:
            finished = _drive(llm, rng, catalogue, picks)
            assert_empty(llm)
        for request_id, tokens in finished.items():
            pick = picks[int(request_id)]
            assert tokens == solo[pick], (request_id, pick, options)


def _drive(
    llm: LLM,
    rng: random.Random,
    catalogue: list[list[int]],
    picks: list[tuple[int, int, bool]],
) -> dict[str, list[int]]:
    """Submit at random times, abort some, step to the end; tokens of the finished ones."""
    engine = llm.engine
    todo = list(range(len(picks)))
    finished: dict[str, list[int]] = {}
    aborted: set[str] = set()
    steps = 0
    while todo or engine.has_unfinished:
        while todo and (rng.random() < 0.4 or not engine.has_unfinished):
            i = todo.pop(0)
            prompt, length, off = picks[i]
            params: SamplingParams = greedy(length, compression="off" if off else None)
            engine.add_request(catalogue[prompt], params, str(i), priority=rng.choice([0, 0, 1]))
        for output in engine.step():
            assert output.error is None, output.error
            finished[output.request_id] = output.outputs[0].token_ids
        engine.core.check_integrity()
        if rng.random() < 0.01:
            victim = str(rng.randrange(len(picks)))
            if engine.abort(victim) is not None:
                aborted.add(victim)
        steps += 1
        assert steps < 20_000, "no progress"
    assert finished.keys() | aborted == {str(i) for i in range(len(picks))}
    return finished
