"""Steps scheduled ahead: what is special about tokens that are read one step later."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small_model import make_small_llm
from tests.engine.workload import assert_empty
from zipage import LLM, RequestOutput, SamplingParams
from zipage.engine.request import PENDING_TOKEN
from zipage.engine.steps import StepRunner
from zipage.execution.sampler import LaunchedSample

pytestmark = pytest.mark.usefixtures("no_retries")


def seeded(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=3, ignore_eos=True, **options)


def answer_beside(llm: LLM, params: SamplingParams, at: int) -> RequestOutput:
    """Stream an answer; after `at` outputs a request arrives whose tokens can't be read later."""
    last, beside = None, None
    for i, output in enumerate(llm.stream([9, 8, 7], params), 1):
        last = output
        if i == at:
            blocking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
            beside = llm.stream([5, 6, 7], blocking)
    if beside is not None:
        list(beside)
    assert last is not None
    return last


def test_nothing_follows_a_stop_string(small_model: Path) -> None:
    """It is found in the text when the next token may already have been computed and read."""
    with make_small_llm(small_model) as llm:
        whole = answer_beside(llm, seeded(max_tokens=14), 0).outputs[0]
        pieces = [llm.get_tokenizer().decode([token]) for token in whole.token_ids]
    stops = {piece for piece in pieces[3:10] if piece.strip()}
    assert len(stops) > 2
    for stop in stops:
        for at in range(1, 7):
            results = []
            for ahead in (False, True):
                with make_small_llm(small_model, async_scheduling=ahead) as llm:
                    output = answer_beside(llm, seeded(max_tokens=14, stop=[stop]), at)
                    assert_empty(llm)
                one = output.outputs[0]
                results.append((one.token_ids, one.text, one.finish_reason, output.usage))
            assert results[0] == results[1]


@pytest.mark.parametrize("at", range(1, 8))
def test_interrupt_while_waiting_for_the_device(
    small_model: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was queued meanwhile is queued again, from the tokens before it."""
    wait, calls = LaunchedSample.wait, 0

    def interrupted(sample: LaunchedSample) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return wait(sample)

    def last_of(stream: Any) -> list[int]:
        *_, output = stream
        return list(output.outputs[0].token_ids)

    with make_small_llm(small_model, async_scheduling=True) as llm:
        expected = last_of(llm.stream([5, 6, 7], seeded(max_tokens=12)))
    with make_small_llm(small_model, async_scheduling=True) as llm:
        survivor = llm.stream([5, 6, 7], seeded(max_tokens=12))
        other = llm.stream([9, 9], seeded(max_tokens=12))
        monkeypatch.setattr(LaunchedSample, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            last_of(other)
        assert last_of(survivor) == expected
        assert_empty(llm)


def test_an_aborted_request_has_no_pending_token(small_model: Path) -> None:
    with make_small_llm(small_model, async_scheduling=True) as llm:
        engine = llm.engine
        engine.add_request([5, 6, 7], seeded(max_tokens=30), "one")
        for _ in range(6):
            engine.step()
        (request,) = engine.core.scheduler.running
        assert request.token_ids[-1] == PENDING_TOKEN
        output = engine.abort("one")
        assert output is not None
        assert request.token_ids == [5, 6, 7, *output.outputs[0].token_ids]


def test_an_output_that_arrives_while_a_stream_looks(small_model: Path) -> None:
    """Another thread runs the engine between a stream's two looks at what it has."""
    with make_small_llm(small_model) as llm:
        stream = llm.stream([5, 6, 7], seeded(max_tokens=1))

        class Ready(deque[RequestOutput]):
            looked = False

            def __bool__(self) -> bool:
                there = len(self) > 0
                if not self.looked:
                    self.looked = True
                    with llm._exclusive():
                        llm._advance()
                return there

        stream._ready = Ready()  # type: ignore[attr-defined]
        assert [output.finished for output in stream] == [True]


@pytest.mark.parametrize("ahead", [False, True])
def test_bad_content_is_not_found_again(small_model: Path, ahead: bool) -> None:
    """Blocks of a request whose logits were NaN are not for others with the same prefix."""
    prompt = list(range(20, 60))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with make_small_llm(small_model) as llm:
        expected = [llm.generate([p], params)[0].outputs[0] for p in (prompt, [*prompt[:-1], 99])]
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        weight = llm.engine.core.runner.model.embed_weight.data
        row = weight[25].clone()
        weight[25] = torch.nan
        (failed,) = llm.generate([prompt], params)
        assert failed.error is not None and "NaN" in failed.error
        weight[25] = row
        outputs = llm.generate([prompt, [*prompt[:-1], 99]], params)
        assert_empty(llm)
    for output, one in zip(outputs, expected, strict=True):
        assert output.error is None and output.outputs[0].token_ids == one.token_ids


#: Everything that is sampled without the host: each kind sees the tokens before in another way.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 4},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.5, "seed": 4, "presence_penalty": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "seed": 5, "min_p": 0.02, "logit_bias": {7: 4.0, 9: 4.0}, "logprobs": 0},
    {"temperature": 2.0, "seed": 6, "min_tokens": 9, "frequency_penalty": -0.3, "logprobs": 2},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 5, "logit_bias": {2: 30.0}, "ignore_eos": False},
]


@pytest.mark.parametrize("tight", [False, True])
def test_every_kind_of_sampling_runs_ahead(
    small_model: Path, tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for the one before it, and the tokens are those of one that does."""
    options = {"num_kv_blocks": 12, "admission": "optimistic"} if tight else {}
    # Whose turn it is differs between the modes once requests are preempted.
    kinds = [kind for kind in KINDS if not tight or "seed" in kind or not kind["temperature"]]
    kinds = [{"max_tokens": 40, "ignore_eos": True, **kind} for kind in kinds]
    prompts = [list(range(3 + i, 30 + 3 * i)) for i in range(len(kinds))]
    results = []
    for ahead in (False, True):
        if ahead and not tight:
            monkeypatch.setattr(StepRunner, "_execute", None)
        with make_small_llm(small_model, async_scheduling=ahead, **options) as llm:
            outputs = llm.generate(prompts, [SamplingParams(**kind) for kind in kinds])
            assert (llm.stats().preemptions > 0) is tight
            assert_empty(llm)
            counts = llm.engine.core.runner.sampler._counts
            assert counts is not None and len(counts.counts) == llm.config.max_num_seqs
        answers = [output.outputs[0] for output in outputs]
        results.append([(a.token_ids, a.logprobs, a.finish_reason) for a in answers])
    assert results[0] == results[1]
    assert len(results[0][-1][0]) == 6 and results[0][-1][2] == "stop"
