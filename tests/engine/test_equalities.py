"""Invariants 4 and 5: what must never change a request's text (greedy, CPU, fp32)."""

from __future__ import annotations

import pytest

from tests.engine.workload import (
    assert_empty,
    greedy,
    make_llm,
    prompt_ids,
    run_alone,
    tokens_of,
)
from zipage import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_retries")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with make_llm() as llm:
        return [prompt_ids(llm, 3 + 3 * i, seed=i) for i in range(8)]


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    return [greedy(60 + 25 * i) for i in range(8)]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return run_alone(prompts, params)


VARIANTS = {
    "batched": {},
    "async": {"async_compression": True},
    "ahead": {"async_scheduling": True},
    "ahead, async": {"async_scheduling": True, "async_compression": True, "num_query_slots": 1},
    "ahead, tight": {"async_scheduling": True, "num_kv_blocks": 24, "admission": "optimistic"},
    "stable compaction": {"compaction": "stable", "num_kv_blocks": 40},
    "tight pool": {"num_kv_blocks": 24},
    "tight pool, optimistic": {"num_kv_blocks": 24, "admission": "optimistic"},
    "one slot": {"num_query_slots": 1},
    "one slot, tight, async": {
        "num_query_slots": 1,
        "num_kv_blocks": 24,
        "admission": "optimistic",
        "async_compression": True,
    },
    "small steps": {"max_num_batched_tokens": 19},
    "no prefix cache": {"enable_prefix_caching": False},
    "two at once": {"max_num_seqs": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_schedule_does_not_change_text(
    name: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    alone: list[list[int]],
) -> None:
    if "compaction" in VARIANTS[name]:
        # The other slot order means other blocks, and so another lightning redundancy.
        alone = run_alone(prompts, params, compaction="stable")
    with make_llm(**VARIANTS[name]) as llm:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts, params)  # now with prefix hits, where there is a cache
        assert_empty(llm)
        compressed = [o.metrics.compressions for o in outputs]
    assert [tokens_of(o) for o in outputs] == alone
    assert [tokens_of(o) for o in again] == alone
    assert sum(compressed) > 8
    if name == "batched":
        hits = [o.metrics.cached_prompt_tokens for o in again]
        assert any(hits), "the second round must find the first one's prompts"


def test_swapped_requests_continue_exactly(prompts: list[list[int]]) -> None:
    """A request of higher priority grows where only compressed ones can make room: they are
    swapped out, and go on as if nothing had happened."""
    texts = [prompts[0][:20], prompts[1][:20], prompts[2][:20], prompts[3][:10]]
    params = [greedy(150)] * 3 + [greedy(100, compression="off")]
    with make_llm(num_kv_blocks=13, admission="optimistic") as llm:
        engine, done, late = llm.engine, {}, False
        for i in range(3):
            engine.add_request(texts[i], params[i], str(i), priority=1)
        while engine.has_unfinished:
            if not late and engine.core.scheduler.counters.compressions >= 6:
                late = True
                engine.add_request(texts[3], params[3], "3", priority=0)
            for output in engine.step():
                done[output.request_id] = output
            engine.core.check_integrity()
        stats = llm.stats()
        assert_empty(llm)
    assert stats.preemptions_swap > 0
    assert sum(o.metrics.swaps for o in done.values()) == stats.preemptions_swap
    assert done["3"].metrics.preemptions == 0
    assert [tokens_of(done[str(i)]) for i in range(4)] == run_alone(texts, params)


def test_bounded_admission_prevents_preemption(prompts: list[list[int]]) -> None:
    short = [prompt[:20] for prompt in prompts]
    with make_llm(num_kv_blocks=14) as llm:
        outputs = llm.generate(short, greedy(150))
        assert llm.stats().preemptions == 0
        assert all(o.metrics.peak_blocks <= 5 for o in outputs)


def test_within_budget_equals_full_kv(prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=3)
    with make_llm(compression="full", kv_budget=None) as full:
        expected = full.generate(prompts, params)
    with make_llm(kv_budget=1024) as llm:
        outputs = llm.generate(prompts, params)
        off = llm.generate(
            prompts,
            SamplingParams(
                temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=3, compression="off"
            ),
        )
        assert llm.stats().compressions == 0
    for one, other, third in zip(expected, outputs, off, strict=True):
        assert tokens_of(one) == tokens_of(other) == tokens_of(third)
        assert one.outputs[0].logprobs == other.outputs[0].logprobs == third.outputs[0].logprobs


def test_one_against_a_hundred_concurrent() -> None:
    with make_llm(num_kv_blocks=1200, max_num_seqs=128) as llm:
        target = prompt_ids(llm, 9, seed=77)
        params = greedy(150)
        (single,) = llm.generate([target], params)
        crowd = [prompt_ids(llm, 2 + i % 12, seed=i) for i in range(99)]
        outputs = llm.generate([*crowd[:50], target, *crowd[50:]], params)
        assert outputs[50].metrics.compressions > 1
        assert tokens_of(outputs[50]) == tokens_of(single)
        assert max(s for s in [llm.stats().mean_running]) > 1


def test_shared_long_prefix_below_budget() -> None:
    """Eight requests share a prefix longer than their budget; the cache stays clean."""
    with make_llm() as llm:
        prefix = prompt_ids(llm, 20, seed=5)
        tails = [prompt_ids(llm, 1 + i, seed=50 + i) for i in range(8)]
    prompts = [prefix + tail for tail in tails]
    params = [greedy(80)] * 8
    expected = run_alone(prompts, params)
    with make_llm() as llm:
        llm.generate([prefix], greedy(1))
        outputs = llm.generate(prompts, params)
        assert [tokens_of(o) for o in outputs] == expected
        assert all(o.metrics.cached_prompt_tokens >= 64 for o in outputs)
        assert all(o.metrics.compressions >= 1 for o in outputs)
        later = llm.generate(prompts[::-1], params)
        assert [tokens_of(o) for o in later] == expected[::-1]
        full = llm.generate([prefix], greedy(60, compression="off"))
        assert_empty(llm)
    with make_llm(compression="full", kv_budget=None, enable_prefix_caching=False) as clean:
        assert tokens_of(full[0]) == tokens_of(clean.generate([prefix], greedy(60))[0])


def test_two_engines_in_one_process(
    prompts: list[list[int]], params: list[SamplingParams], alone: list[list[int]]
) -> None:
    import threading

    results: dict[int, list[list[int]]] = {}

    def work(key: int, llm: LLM) -> None:
        results[key] = [tokens_of(o) for o in llm.generate(prompts, params)]

    with make_llm() as first, make_llm(num_kv_blocks=60, block_size=16) as second:
        threads = [
            threading.Thread(target=work, args=(key, llm)) for key, llm in ((0, first), (1, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results[0] == alone and results[1] == alone


@pytest.mark.parametrize("policy", ["rkv", "streaming", "random", "snapkv", "zipage-paper"])
def test_every_policy_is_independent_of_the_batch(
    policy: str, prompts: list[list[int]], params: list[SamplingParams]
) -> None:
    expected = run_alone(prompts[:4], params[:4], compression=policy)
    with make_llm(compression=policy, async_compression=True, num_kv_blocks=40) as llm:
        outputs = llm.generate(prompts[:4], params[:4])
        assert_empty(llm)
    assert [tokens_of(o) for o in outputs] == expected
