"""Random schedules on the real model, token for token (design invariants 1 to 6)."""

from __future__ import annotations

import os
import random

import pytest

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids
from zipage import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("no_retries")

SCHEDULES = int(os.environ.get("ZIPAGE_SCHEDULES", "100"))
GROUPS = 10

#: Prompt, answer length, full cache, and a kind of sampling.
Pick = tuple[int, int, bool, str]


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
    solo: dict[Pick, RequestOutput] = {}
    for _ in range(-(-SCHEDULES // GROUPS)):
        count = rng.randint(1, 5)
        picks = [
            (
                rng.randrange(len(catalogue)),
                rng.choice([1, 5, 30, 70]),
                rng.random() < 0.25,
                rng.choice(["greedy", "greedy", "drawn", "seeded", "prompt logprobs"]),
            )
            for _ in range(count)
        ]
        # Equal requests are submitted at once, and share the computing of their prompt.
        picks = [pick for pick in picks for _ in range(rng.choice([1, 1, 1, 1, 3]))]
        missing = [p for p in dict.fromkeys(picks) if p not in solo]
        with make_llm(enable_prefix_caching=False, num_kv_blocks=1000, **shared) as llm:
            for pick in missing:
                (solo[pick],) = llm.generate([catalogue[pick[0]]], _params(pick))
        b = int(shared["block_size"])  # type: ignore[call-overload]
        largest = max(-(-(len(catalogue[i]) + n) // b) for i, n, _, _ in picks)
        largest = max(largest, int(shared["kv_budget"]) // b + 1)  # type: ignore[call-overload]
        options = dict(
            shared,
            num_kv_blocks=largest + rng.choice([0, 1, 3, 8, 40]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([7, 32, 256]),
            admission=rng.choice(["bounded", "optimistic"]),
            enable_prefix_caching=rng.random() < 0.7,
            async_compression=rng.random() < 0.5,
            async_scheduling=rng.random() < 0.5,
        )
        with make_llm(**options) as llm:
            finished = _drive(llm, rng, catalogue, picks)
            assert_empty(llm)
        for request_id, output in finished.items():
            pick = picks[int(request_id)]
            answer, expected = output.outputs[0], solo[pick].outputs[0]
            assert answer.token_ids == expected.token_ids, (request_id, pick, options)
            assert answer.logprobs == expected.logprobs, (request_id, pick, options)
            assert output.prompt_logprobs == solo[pick].prompt_logprobs, (request_id, pick, options)


def _params(pick: Pick) -> SamplingParams:
    prompt, length, off, kind = pick
    compression = "off" if off else None
    if kind == "greedy":
        return greedy(length, compression=compression)
    if kind == "drawn":
        return SamplingParams(
            temperature=2.0,
            seed=prompt,
            max_tokens=length,
            ignore_eos=True,
            compression=compression,
        )
    return SamplingParams(
        temperature=20.0,
        top_p=0.9,
        repetition_penalty=1.1,
        seed=prompt,
        max_tokens=length,
        ignore_eos=True,
        compression=compression,
        logprobs=1,
        prompt_logprobs=1 if kind == "prompt logprobs" else None,
    )


def _drive(
    llm: LLM,
    rng: random.Random,
    catalogue: list[list[int]],
    picks: list[Pick],
) -> dict[str, RequestOutput]:
    """Submit at random times, abort some, step to the end; outputs of the finished ones."""
    engine = llm.engine
    todo = list(range(len(picks)))
    finished: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    steps = 0
    same: Pick | None = None
    while todo or engine.has_unfinished:
        while todo and (rng.random() < 0.4 or not engine.has_unfinished or same == picks[todo[0]]):
            i = todo.pop(0)
            same = picks[i]
            params, priority = _params(picks[i]), rng.choice([0, 0, 1])
            engine.add_request(catalogue[picks[i][0]], params, str(i), priority=priority)
        for output in engine.step():
            assert output.error is None, output.error
            finished[output.request_id] = output
        engine.core.check_integrity()
        if rng.random() < 0.01:
            victim = str(rng.randrange(len(picks)))
            if engine.abort(victim) is not None:
                aborted.add(victim)
        steps += 1
        assert steps < 20_000, "no progress"
    assert finished.keys() | aborted == {str(i) for i in range(len(picks))}
    return finished
