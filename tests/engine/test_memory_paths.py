"""The memory paths other engines got wrong, each on the real model."""

from __future__ import annotations

import pytest
import torch

from tests.engine.workload import (
    assert_empty,
    greedy,
    make_llm,
    prompt_ids,
    run_alone,
    tokens_of,
)
from zipage import LLM, RequestError


@pytest.fixture(scope="module")
def text() -> list[int]:
    """A prompt of a few hundred tokens to cut pieces from."""
    with make_llm() as llm:
        return prompt_ids(llm, 30, seed=3)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64, 80])
@pytest.mark.parametrize("compression", ["zipage", "full"])
def test_same_prompt_twice(text: list[int], length: int, compression: str) -> None:
    """A full prefix hit recomputes at least one token, and gives the same answer."""
    budget = 64 if compression == "zipage" else None
    with make_llm(compression=compression, kv_budget=budget) as llm:
        first, second = (llm.generate([text[:length]], greedy(20))[0] for _ in range(2))
        assert tokens_of(first) == tokens_of(second)
        assert first.metrics.cached_prompt_tokens == 0
        assert second.metrics.cached_prompt_tokens == (length - 1) // 16 * 16
        assert_empty(llm)


def test_identical_prompts_in_one_step_one_aborted(text: list[int]) -> None:
    prompt = text[:70]
    (expected,) = run_alone([prompt], [greedy(40)])
    with make_llm() as llm:
        engine = llm.engine
        for name in "abc":
            engine.add_request(prompt, greedy(40), name)
        engine.step()
        aborted = engine.abort("b")
        assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
        done = {}
        while engine.has_unfinished:
            for output in engine.step():
                done[output.request_id] = tokens_of(output)
            engine.core.check_integrity()
        assert done == {"a": expected, "c": expected}
        assert_empty(llm)


def test_prefix_hit_after_preemption(text: list[int]) -> None:
    """Preempted requests find their own blocks again, and their text does not change."""
    prompts = [text[i : i + 40] for i in (0, 40, 80)]
    params = [greedy(60)] * 3
    expected = run_alone(prompts, params, compression="full", kv_budget=None)
    with make_llm(compression="full", kv_budget=None, num_kv_blocks=12) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().preemptions_recompute > 0
        assert [tokens_of(o) for o in outputs] == expected
        # Recomputed tokens are not prompt tokens found in the cache.
        assert all(o.metrics.cached_prompt_tokens == 0 for o in outputs)
        assert_empty(llm)


@pytest.mark.parametrize("warm", [False, True])
def test_recomputed_tokens_are_not_counted_as_cached(text: list[int], warm: bool) -> None:
    """Known bug elsewhere: after a preemption a request found its own blocks, and its usage said
    that so many prompt tokens had been cached."""
    prompt = text[:130]
    options = {"compression": "full", "kv_budget": None, "max_num_batched_tokens": 50}
    with make_llm(**options) as llm:
        if warm:
            llm.generate([prompt[:70]], greedy(1))
        found = 64 if warm else 0
        before = llm.stats().prefix_cache_hits
        llm.engine.add_request(prompt, greedy(40), "one")
        result, steps, preempted = None, 0, 0
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                result = output
            steps += 1
            running = llm.engine.core.scheduler.running
            if running and steps in (2, 8, 20, 30):  # in its prefill, then in its decode
                llm.engine.core.scheduler._preempt(running[0])
                preempted += 1
        assert result is not None and result.metrics.preemptions == preempted == 4
        assert result.metrics.cached_prompt_tokens == found
        assert llm.stats().prefix_cache_hits - before == found
        assert_empty(llm)


def test_abort_in_mid_prefill_then_same_prefix(text: list[int]) -> None:
    prompt = text[:200]
    (expected,) = run_alone([prompt], [greedy(30)])
    with make_llm(max_num_batched_tokens=50) as llm:
        llm.engine.add_request(prompt, greedy(30), "cut")
        llm.engine.step()
        llm.engine.step()
        assert llm.engine.abort("cut") is not None
        assert_empty(llm)
        (output,) = llm.generate([prompt], greedy(30))
        assert tokens_of(output) == expected
        assert output.metrics.cached_prompt_tokens == 96, "the finished chunks are reusable"


def test_three_chunks_and_one_token_without_prefix_cache(text: list[int]) -> None:
    prompt = text[:97]
    (expected,) = run_alone([prompt], [greedy(30)])
    with make_llm(max_num_batched_tokens=32, enable_prefix_caching=False) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], greedy(30))
            assert tokens_of(output) == expected
            assert output.metrics.cached_prompt_tokens == 0


def test_request_that_fits_the_model_but_not_the_pool(text: list[int]) -> None:
    with make_llm(num_kv_blocks=10) as llm:
        with pytest.raises(RequestError, match=r"300 prompt tokens.*19 blocks.*10 \(160 tokens\)"):
            llm.generate([(text * 2)[:300]], greedy(5))
        with pytest.raises(RequestError, match="never fit"):
            llm.generate([text[:20]], greedy(200, compression="off"))
        assert_empty(llm)
        # The same answers fit under the budget.
        (output,) = llm.generate([text[:20]], greedy(400))
        assert len(tokens_of(output)) == 400 and output.metrics.peak_blocks <= 5
    with make_llm(num_kv_blocks=10, bounded_prefill=True) as llm:
        (output,) = llm.generate([(text * 2)[:300]], greedy(5))
        assert output.metrics.peak_blocks <= 5 and output.metrics.compressions > 10


def test_large_request_waits_with_small_ones_behind_it(text: list[int]) -> None:
    options = {"compression": "full", "kv_budget": None}
    prompts = [text[:30], text[30:150], text[150:160], text[160:175]]
    params = [greedy(60), greedy(30), greedy(5), greedy(5)]
    expected = run_alone(prompts, params, **options)
    with make_llm(num_kv_blocks=10, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert [tokens_of(o) for o in outputs] == expected
        assert_empty(llm)


def test_preemption_right_after_compression(text: list[int]) -> None:
    """A request swapped out at the step after its compression goes on exactly."""
    prompt = text[:60]
    (expected,) = run_alone([prompt], [greedy(60)])
    with make_llm() as llm:
        core = llm.engine.core
        llm.engine.add_request(prompt, greedy(60), "one")
        swaps, result = 0, None
        seen = 0
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                result = tokens_of(output)
            if core.scheduler.counters.compressions > seen:
                seen = core.scheduler.counters.compressions
                (request,) = core.scheduler.running
                core.scheduler._preempt(request)
                swaps += 1
        assert swaps >= 2 and result == expected
        assert_empty(llm)


def test_compression_while_another_prompt_is_prefilled(text: list[int]) -> None:
    prompts = [text[:60], (text * 2)[:380]]
    params = [greedy(60), greedy(20)]
    expected = run_alone(prompts, params)
    with make_llm(max_num_batched_tokens=16, async_compression=True) as llm:
        outputs = llm.generate(prompts, params)
        assert [tokens_of(o) for o in outputs] == expected
        assert outputs[0].metrics.compressions > 0
        assert_empty(llm)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["zipage", "zipage-paper", "rkv", "snapkv"])
def test_equal_and_zero_keys(text: list[int], value: float, policy: str) -> None:
    """Degenerate keys neither fail nor give NaN."""
    with make_llm(compression=policy) as llm:
        model = llm.engine.core.runner.model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "k_norm" in name:
                    parameter.fill_(0.0)
        if value:
            _make_keys_equal(llm)
        (output,) = llm.generate([text[:60]], greedy(60))
        assert len(tokens_of(output)) == 60
        assert torch.isfinite(llm.engine.core.runner.cache.kv).all()
        assert output.metrics.compressions > 2
        assert_empty(llm)


def _make_keys_equal(llm: LLM) -> None:
    """Write the same key for every token: rows of ones, left to RoPE at no angle."""
    runner = llm.engine.core.runner
    execute = runner.backend.attend

    def attend(layer, qkv, transform, step):  # type: ignore[no-untyped-def]
        out = execute(layer, qkv, transform, step)
        runner.cache.kv[layer, :, 0] = 1.0
        return out

    runner.backend.attend = attend  # type: ignore[method-assign]


def test_n_samples_share_the_prompt(text: list[int]) -> None:
    with make_llm() as llm:
        (output,) = llm.generate([text[:100]], greedy(20, n=4))
        first, *rest = (c.token_ids for c in output.outputs)
        assert all(other == first for other in rest)
        # The last 16 prompt tokens are the window of the coming compression: always computed.
        assert [c.metrics.cached_prompt_tokens for c in output.outputs] == [0, 80, 80, 80]
        assert output.usage.completion_tokens == 80
        assert_empty(llm)
