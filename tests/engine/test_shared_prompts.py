"""Requests with equal prompts, submitted at once: the prompt is computed and stored once."""

from __future__ import annotations

import pytest

from tests.engine.workload import assert_empty, make_llm, tokens_of
from zipage import LLM, RequestOutput, SamplingParams
from zipage.engine.scheduler import StepPlan

PROMPT = [3 + i * i % 300 for i in range(500)]
BLOCK = 16
#: Tokens of the prompt that each request computes itself: those behind the last block shared.
OWN = len(PROMPT) - (len(PROMPT) - 1) // BLOCK * BLOCK


def params(index: int, length: int = 20, n: int = 1) -> SamplingParams:
    return SamplingParams(seed=index, n=n, max_tokens=length, ignore_eos=True, temperature=1.2)


@pytest.fixture(scope="module")
def solo() -> list[list[int]]:
    """The answers of eight seeds, each computed alone with full KV."""
    with make_llm(enable_prefix_caching=False, kv_budget=None) as llm:
        return [tokens_of(llm.generate([PROMPT], params(i))[0]) for i in range(8)]


@pytest.mark.parametrize("batch", [64, 4096])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("together", ["n", "requests"])
def test_eight_samples_compute_their_prompt_once(
    together: str, ahead: bool, batch: int, solo: list[list[int]]
) -> None:
    options = {"async_scheduling": ahead, "max_num_batched_tokens": batch}
    with make_llm(kv_budget=None, num_kv_blocks=100, **options) as llm:
        if together == "n":
            (output,) = llm.generate([PROMPT], params(0, n=8))
            found = [answer.token_ids for answer in output.outputs]
        else:
            outputs = llm.generate([PROMPT] * 8, [params(i) for i in range(8)])
            found = [tokens_of(output) for output in outputs]
            cached = [output.metrics.cached_prompt_tokens for output in outputs]
            assert cached == [0] + [len(PROMPT) - OWN] * 7
        stats = llm.stats()
        assert_empty(llm)
    assert found == solo
    assert stats.prefill_tokens == len(PROMPT) + 7 * OWN
    # Eight prompts stored eight times would not even fit the pool at once.
    assert stats.prefix_cache_hits == 7 * (len(PROMPT) - OWN) and not stats.preemptions


@pytest.mark.parametrize("ahead", [False, True])
def test_compression_of_one_leaves_the_prompt_to_the_others(ahead: bool) -> None:
    with make_llm(enable_prefix_caching=False) as llm:
        expected = [tokens_of(llm.generate([PROMPT], params(i, 80))[0]) for i in range(5)]
    with make_llm(async_scheduling=ahead, async_compression=ahead, num_query_slots=2) as llm:
        outputs = llm.generate([PROMPT] * 5, [params(i, 80) for i in range(5)])
        assert all(output.metrics.compressions > 1 for output in outputs)
        assert [tokens_of(output) for output in outputs] == expected
        # The window is never found in the cache, but computed.
        assert llm.stats().prefill_tokens < len(PROMPT) + 5 * (OWN + 2 * BLOCK)
        assert_empty(llm)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("end", ["poison", "abort"])
def test_the_one_that_computes_the_prompt_ends_in_that_step(
    end: str, ahead: bool, solo: list[list[int]]
) -> None:
    """Whether its step fails or it is aborted between two chunks, another computes what is left."""
    with make_llm(kv_budget=None, max_num_batched_tokens=200, async_scheduling=ahead) as llm:
        engine = llm.engine
        ids = [engine.add_request(PROMPT, params(i)) for i in range(6)]
        other = engine.add_request(PROMPT[::-1], params(7))
        if end == "poison":
            poison(llm)
        else:
            engine.step()
            engine.abort(ids[0])
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
            engine.core.check_integrity()
        assert [tokens_of(outputs[name]) for name in ids[1:]] == solo[1:6]
        assert outputs[other].error is None
        if end == "poison":
            assert outputs[ids[0]].error == "model step failed: ValueError: bad row"
        assert_empty(llm)


def poison(llm: LLM) -> None:
    """Make every step fail that computes the prompt of the first sequence's second chunk."""
    runner = llm.engine.core.runner
    victim = llm.engine.core.scheduler.waiting[0]
    execute, launch = runner.execute, runner.launch

    def check(plan: StepPlan) -> None:
        if any(item.request is victim and item.request.length for item in plan.scheduled):
            raise ValueError("bad row")

    def checked_execute(plan: StepPlan) -> object:
        check(plan)
        return execute(plan)

    def checked_launch(plan: StepPlan, read: object) -> object:
        check(plan)
        return launch(plan, read)  # type: ignore[arg-type]

    runner.execute = checked_execute  # type: ignore[method-assign, assignment]
    runner.launch = checked_launch  # type: ignore[method-assign, assignment]
