"""prompt_logprobs: the model's own numbers, whatever the schedule and the cache do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, tokens_of
from tests.sampling.tokenizers_for_tests import ZIPAGE_TINY
from zipage import LLM, RequestOutput, SamplingParams
from zipage.execution import logprobs as logprobs_module


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with make_llm() as llm:
        return [prompt_ids(llm, steps, seed=steps) for steps in (1, 4, 9, 16)]


def wanted(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return greedy(max_tokens, **{"prompt_logprobs": 2, **options})


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[RequestOutput]:
    with make_llm(enable_prefix_caching=False, num_kv_blocks=1000) as llm:
        return [llm.generate([prompt], wanted(60, logprobs=1))[0] for prompt in prompts]


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.error is None
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs


def test_they_are_the_log_softmax_of_the_reference_model(prompts: list[list[int]]) -> None:
    """Against transformers: values, ranks, the most likely tokens, their texts."""
    model = AutoModelForCausalLM.from_pretrained(ZIPAGE_TINY, dtype=torch.float32).eval()
    # Whatever the sampling options: the numbers are those of temperature 1, before all filters.
    params = SamplingParams(
        temperature=0.3,
        top_k=2,
        seed=1,
        repetition_penalty=1.5,
        logit_bias={7: 20.0},
        max_tokens=3,
        prompt_logprobs=5,
    )
    with make_llm() as llm:
        tokenizer = llm.get_tokenizer()
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].double()
        expected = logits.log_softmax(-1)
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            assert entry is not None
            row = expected[position - 1]
            order = row.argsort(descending=True, stable=True).tolist()
            assert next(iter(entry)) == prompt[position]
            assert len(set(entry) - {prompt[position]}) in (4, 5)
            for token, item in entry.items():
                assert item.logprob == pytest.approx(row[token].item(), abs=2e-4)
                if token != prompt[position]:
                    assert item.rank <= 5
                # Tokens of nearly the same probability may stand in either order.
                neighbour = order[item.rank - 1]
                assert row[neighbour].item() == pytest.approx(row[token].item(), abs=2e-4)
                assert item.decoded_token == tokenizer.decode([token])


VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "chunked without prefix cache": {"max_num_batched_tokens": 19, "enable_prefix_caching": False},
    "async": {"async_compression": True, "num_query_slots": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_schedule_does_not_change_them(
    name: str, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    with make_llm(**VARIANTS[name]) as llm:
        # The second round finds every prompt in the prefix cache, where there is one.
        for _ in range(2):
            outputs = llm.generate(prompts, wanted(60, logprobs=1))
            for output, expected in zip(outputs, alone, strict=True):
                assert_same(output, expected)
        assert sum(o.metrics.compressions for o in outputs) > 0
        assert_empty(llm)


@pytest.mark.parametrize("caching", [True, False])
def test_logprobs_are_not_shifted_by_preemptions(caching: bool, prompts: list[list[int]]) -> None:
    """Known bug elsewhere: recomputed positions were appended once more."""
    full: dict[str, Any] = {"compression": "full", "kv_budget": None}
    params = wanted(90, logprobs=1)
    short = [prompt[:40] for prompt in prompts]
    with make_llm(**full) as llm:
        expected = [llm.generate([prompt], params)[0] for prompt in short]
    with make_llm(
        **full, num_kv_blocks=12, max_num_batched_tokens=40, enable_prefix_caching=caching
    ) as llm:
        outputs = llm.generate(short, params)
        assert llm.stats().preemptions_recompute > 2
        assert_empty(llm)
    for output, other in zip(outputs, expected, strict=True):
        assert_same(output, other)
        answer = output.outputs[0]
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_preemption_in_mid_prefill(
    every: int, caching: bool, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    """Positions that were read before the preemption are neither lost nor read twice."""
    expected = alone[3]
    with make_llm(max_num_batched_tokens=23, enable_prefix_caching=caching) as llm:
        engine, core = llm.engine, llm.engine.core
        engine.add_request(prompts[3], wanted(60, logprobs=1), "one")
        result, steps, preempted = None, 0, 0
        while engine.has_unfinished:
            for output in engine.step():
                result = output
            steps += 1
            (request,) = core.scheduler.running or [None]
            if request is not None and steps % (every + 1) == 0 and not request.compressed:
                core.scheduler._preempt(request)
                preempted += 1
                if preempted % 2:  # else its blocks are found again
                    pool = core.scheduler.pool
                    pool.release(pool.allocate(pool.num_available))
            if preempted > 8:
                every = 10**6
        assert result is not None and preempted > 1
        assert_same(result, expected)
        assert_empty(llm)


def test_prompt_logprobs_do_not_depend_on_the_state_of_the_cache(
    prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    """Known bug elsewhere: prompt tokens found in the prefix cache had no logits."""
    prompt, expected = prompts[2], alone[2]
    with make_llm() as llm:
        (cold,) = llm.generate([prompt], wanted(60, logprobs=1))
        (plain,) = llm.generate([prompt], greedy(60))
        (warm,) = llm.generate([prompt], wanted(60, logprobs=1))
        longer = llm.generate([[*prompt, 5, 6, 7]], wanted(1))[0].prompt_logprobs
        assert_empty(llm)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert plain.prompt_logprobs is None
    assert longer is not None and longer[: len(prompt)] == expected.prompt_logprobs
    # The cache is not read for them, but written and read by others.
    assert cold.metrics.cached_prompt_tokens == warm.metrics.cached_prompt_tokens == 0
    assert plain.metrics.cached_prompt_tokens > 0


@pytest.mark.parametrize("caching", [True, False])
def test_n_answers_share_one_list(
    caching: bool, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    calls = 0
    with make_llm(enable_prefix_caching=caching, max_num_batched_tokens=50) as llm:
        head = llm.engine.core.runner.model.compute_logits

        def count(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += len(hidden)
            return head(hidden)

        llm.engine.core.runner.model.compute_logits = count  # type: ignore[method-assign]
        (output,) = llm.generate([prompts[2]], wanted(4, n=3))
        assert_empty(llm)
    assert output.prompt_logprobs == alone[2].prompt_logprobs
    assert calls == len(prompts[2]) - 1 + 3 * 4, "the prompt is read once for all answers"
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1


def test_prompt_compressed_between_its_chunks(prompts: list[list[int]]) -> None:
    """bounded_prefill: exact up to the first eviction, aligned and reproducible after it."""
    prompt = (prompts[3] * 3)[:380]
    capacity = 64 + 16
    with make_llm(compression="full", kv_budget=None) as llm:
        full = llm.generate([prompt], wanted())[0].prompt_logprobs
    seen = []
    for options in (
        {},
        {"max_num_batched_tokens": 13},
        {"async_compression": True, "num_kv_blocks": 12},
    ):
        with make_llm(bounded_prefill=True, **options) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt], wanted())
                assert output.metrics.compressions > 10 and output.metrics.peak_blocks <= 5
                seen.append(output.prompt_logprobs)
            assert_empty(llm)
    assert all(entries == seen[0] for entries in seen)
    assert full is not None and seen[0] is not None
    assert [next(iter(entry)) for entry in seen[0][1:] if entry] == prompt[1:]
    # The rows up to the first trigger predict the tokens up to the one after it.
    assert seen[0][: capacity + 1] == full[: capacity + 1]
    assert seen[0][capacity + 1 :] != full[capacity + 1 :]


def test_whole_prompt_compressed_after_its_prefill(prompts: list[list[int]]) -> None:
    prompt = (prompts[3] * 3)[:380]
    with make_llm(compression="full", kv_budget=None) as llm:
        full = llm.generate([prompt], wanted())[0].prompt_logprobs
    with make_llm(max_num_batched_tokens=31) as llm:
        (output,) = llm.generate([prompt], wanted())
    assert output.metrics.compressions > 0
    assert output.prompt_logprobs == full


def test_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    largest = 0
    with make_llm() as llm:
        model = llm.engine.core.runner.model
        monkeypatch.setattr(logprobs_module, "MAX_LOGITS", 5 * model.config.vocab_size + 3)
        head = model.compute_logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, len(hidden))
            return head(hidden)

        model.compute_logits = record  # type: ignore[method-assign]
        outputs = llm.generate(prompts, wanted(60, logprobs=1))
    assert largest == 5
    for output, expected in zip(outputs, alone, strict=True):
        assert_same(output, expected)


def test_stream_has_them_from_its_first_output(
    prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    with make_llm(max_num_batched_tokens=20) as llm:
        outputs = list(llm.stream([prompts[2]], wanted(5)))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5]
    assert all(o.prompt_logprobs == alone[2].prompt_logprobs for o in outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [1, 33, 256])
def test_on_cuda_as_on_the_cpu(
    chunk: int, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    """Also where a chunk has one token, as a captured decode step has."""
    params = wanted(5, prompt_logprobs=0)
    with make_llm(device="cuda", dtype="float32", max_num_batched_tokens=chunk) as llm:
        for output, expected in zip(llm.generate(prompts, params), alone, strict=True):
            assert output.prompt_logprobs is not None and expected.prompt_logprobs is not None
            pairs = zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
            for (mine, theirs), token in zip(pairs, output.prompt_token_ids[1:], strict=True):
                assert mine is not None and theirs is not None
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=5e-3)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_shapes(top: int, prompts: list[list[int]]) -> None:
    with make_llm() as llm:
        one, many = llm.generate([[5], prompts[0]], wanted(2, prompt_logprobs=top))
    assert one.prompt_logprobs == [None]
    assert many.prompt_logprobs is not None and many.prompt_logprobs[0] is None
    for token, entry in zip(prompts[0][1:], many.prompt_logprobs[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token
        ranks = sorted(item.rank for item in entry.values() if item.rank <= top)
        assert ranks == list(range(1, top + 1))
        assert len(entry) == top + (entry[token].rank > top)
        assert sum(math.exp(item.logprob) for item in entry.values()) < 1 + 1e-6


@pytest.mark.parametrize("cause", [MemoryError, RuntimeError])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_tried_again_loses_and_repeats_nothing(
    cause: type[Exception], after: bool, prompts: list[list[int]]
) -> None:
    """Also if it failed when everything had been computed and drawn."""
    params = [
        SamplingParams(
            temperature=20.0, seed=i, max_tokens=30, ignore_eos=True, logprobs=1, prompt_logprobs=1
        )
        for i in range(4)
    ]
    with make_llm(max_num_batched_tokens=60) as llm:
        expected = [llm.generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    with make_llm(max_num_batched_tokens=60) as llm:
        runner = llm.engine.core.runner
        inner, calls, failures = runner.execute, 0, 0

        def execute(plan: Any) -> Any:
            nonlocal calls, failures
            calls += 1
            fails = calls % 3 == 0 and plan.num_tokens > 1
            if fails and not after:
                failures += 1
                raise cause("on purpose")
            output = inner(plan)
            if fails:
                failures += 1
                raise cause("on purpose")
            return output

        runner.execute = execute  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params)
        assert failures > 10
        assert_empty(llm)
    whole = 0
    for output, other in zip(outputs, expected, strict=True):
        if output.error is None:
            whole += 1
            assert_same(output, other)
        else:
            assert "on purpose" in output.error
    assert whole >= 3


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_unusable_logits_of_a_prompt_fail_its_request_only(
    fault: float, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    """A row in the middle of the prompt: of no use to prompt_logprobs, and to nothing else."""
    marker = prompts[2][50]
    with make_llm(max_num_batched_tokens=30) as llm:
        _spoil(llm, marker, 50, fault)
        outputs = llm.generate(
            [prompts[2], prompts[2], prompts[1]],
            [wanted(60, logprobs=1), greedy(60, logprobs=1), wanted(60, logprobs=1)],
        )
        assert_empty(llm)
    bad, without, other = outputs
    assert bad.outputs[0].finish_reason == "error" and bad.prompt_logprobs is None
    assert bad.error is not None and "prompt token 50 are not usable" in bad.error
    assert tokens_of(without) == tokens_of(alone[2])
    assert_same(other, alone[1])


def _spoil(llm: LLM, token: int, position: int, value: float) -> None:
    """Make the logits unusable that follow `token` at `position`."""
    model = llm.engine.core.runner.model
    forward = model.forward

    def spoiled(step: Any, backend: Any) -> torch.Tensor:
        hidden = forward(step, backend)
        rows = (step.input_ids == token) & (step.positions == position)
        hidden[rows.nonzero().squeeze(1)] = math.nan if math.isnan(value) else math.inf
        return hidden

    head = model.compute_logits

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if math.isinf(value):
            bad = hidden.isinf().all(-1)
            if value > 0:
                logits[bad] = 0.0
                logits[bad, 3] = value
            else:
                logits[bad] = value
        return logits

    model.forward = spoiled  # type: ignore[method-assign]
    model.compute_logits = logits_of  # type: ignore[method-assign]
