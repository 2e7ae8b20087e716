"""Sampling options through the whole engine: seeds, temperatures, ends, impossible logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.workload import assert_empty, greedy, ledger, make_llm, prompt_ids, tokens_of
from zipage import LLM, RequestError, RequestOutput, SamplingParams


def answers(output: RequestOutput) -> list[list[int]]:
    assert output.error is None, output.error
    return [completion.token_ids for completion in output.outputs]


# ---------------------------------------------------------------------- seeds


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with make_llm() as llm:
        return [prompt_ids(llm, steps, seed=steps) for steps in (1, 3, 6, 2)]


SEEDED = [
    SamplingParams(seed=11, temperature=20.0, max_tokens=70, ignore_eos=True),
    SamplingParams(seed=11, temperature=20.0, max_tokens=90, ignore_eos=True, n=2, logprobs=1),
    SamplingParams(
        seed=12,
        temperature=20.0,
        top_p=0.95,
        repetition_penalty=1.2,
        max_tokens=60,
        ignore_eos=True,
    ),
    SamplingParams(
        seed=0, temperature=10.0, min_p=0.01, frequency_penalty=0.3, min_tokens=50, max_tokens=80
    ),
]
FULL: dict[str, Any] = {"compression": "full", "kv_budget": None}
SCHEDULES: dict[str, dict[str, Any]] = {
    "small steps": {"max_num_batched_tokens": 19},
    "two at once": {"max_num_seqs": 2},
    "async compression": {"async_compression": True},
    "async, one slot, tight": {
        "async_compression": True,
        "num_query_slots": 1,
        "num_kv_blocks": 24,
        "admission": "optimistic",
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "full cache": FULL,
    "full cache, preempted": {**FULL, "num_kv_blocks": 13},
    "full cache, preempted, no prefix cache": {
        **FULL,
        "num_kv_blocks": 13,
        "enable_prefix_caching": False,
    },
}


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> dict[str, list[RequestOutput]]:
    """Each request by itself, with the budget and with the full cache."""
    found = {}
    for name, options in (("zipage", {}), ("full", FULL)):
        with make_llm(enable_prefix_caching=False, **options) as llm:
            found[name] = [
                llm.generate([prompt], one)[0] for prompt, one in zip(prompts, SEEDED, strict=True)
            ]
    assert sum(o.metrics.compressions for o in found["zipage"]) > 4
    streams = [tuple(tokens) for output in found["full"] for tokens in answers(output)]
    assert len(set(streams)) == 5
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_seed_gives_the_same_stream_whatever_the_schedule(
    name: str, prompts: list[list[int]], alone: dict[str, list[RequestOutput]]
) -> None:
    """Batch composition, preemption, prefix hits, sync and async compression."""
    options = SCHEDULES[name]
    expected = alone[options.get("compression", "zipage")]
    noise = SamplingParams(temperature=20.0, max_tokens=25, ignore_eos=True)
    with make_llm(**options) as llm:
        for _ in range(2):  # the second time with prefix hits, where there is a cache
            outputs = llm.generate([prompts[0], *prompts, prompts[1]], [noise, *SEEDED, noise])[
                1:-1
            ]
            for output, other in zip(outputs, expected, strict=True):
                assert answers(output) == answers(other)
                for mine, theirs in zip(output.outputs, other.outputs, strict=True):
                    assert mine.logprobs == theirs.logprobs and mine.text == theirs.text
        if "preempted" in name:
            assert llm.stats().preemptions_recompute > 0
        assert_empty(llm)


def test_a_seed_survives_swaps(
    prompts: list[list[int]], alone: dict[str, list[RequestOutput]]
) -> None:
    with make_llm() as llm:
        core = llm.engine.core
        llm.engine.add_request(prompts[2], SEEDED[2], "one")
        result, steps = None, 0
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                result = output
            steps += 1
            if steps % 9 == 0 and core.scheduler.running:
                core.scheduler._preempt(core.scheduler.running[0])
        assert result is not None and result.metrics.swaps > 2
        assert answers(result) == answers(alone["zipage"][2])
        assert_empty(llm)


def test_seed_beside_an_unseeded_request(prompts: list[list[int]]) -> None:
    """Known bug elsewhere: one unseeded request in the batch, and all seeds were ignored."""
    seeded = SamplingParams(seed=5, temperature=20.0, max_tokens=40, ignore_eos=True)
    unseeded = SamplingParams(temperature=20.0, max_tokens=40, ignore_eos=True)
    with make_llm() as llm:
        (expected,) = llm.generate([prompts[0]], seeded)
        for before, after in ((1, 0), (0, 1), (3, 2)):
            params = [unseeded] * before + [seeded] + [unseeded] * after
            outputs = llm.generate([prompts[0]] * len(params), params)
            assert answers(outputs[before]) == answers(expected)
            streams = [tuple(answers(output)[0]) for output in outputs]
            assert len(set(streams)) == len(streams), "all requests draw differently"


def test_unseeded_samples_differ_and_seeded_ones_are_reproducible(
    prompts: list[list[int]],
) -> None:
    free = SamplingParams(temperature=20.0, max_tokens=20, ignore_eos=True, n=8)
    fixed = SamplingParams(temperature=20.0, max_tokens=20, ignore_eos=True, n=8, seed=3)
    with make_llm() as llm:
        one, two, three, four = llm.generate([prompts[0]] * 4, [free, free, fixed, fixed])
    assert len({tuple(tokens) for tokens in answers(one) + answers(two)}) == 16
    assert len({tuple(tokens) for tokens in answers(three)}) == 8
    assert answers(three) == answers(four)
    # A second engine, another day.
    with make_llm(seed=99) as llm:
        (later,) = llm.generate([prompts[0]], fixed)
        (other,) = llm.generate([prompts[0]], free)
    assert answers(later) == answers(three)
    assert answers(other) != answers(one)


# ---------------------------------------------------------------------- temperatures


def test_temperature_zero_and_tiny_ones_are_greedy(prompts: list[list[int]]) -> None:
    """Whatever the other options of drawing are."""
    options = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    variants = [
        SamplingParams(temperature=temperature, **options, **more)
        for temperature in (0.0, 1e-300, 1e-6, 1e-5, 1e-4)
        for more in (
            {},
            {"top_p": 0.1},
            {"top_p": 1e-9, "top_k": 1, "min_p": 1.0},
            {"top_k": 3, "seed": 4},
            {"min_p": 0.5},
        )
    ]
    with make_llm() as llm:
        (expected,) = llm.generate([prompts[1]], greedy(40, logprobs=0))
        for output in llm.generate([prompts[1]] * len(variants), variants):
            assert answers(output) == answers(expected)
            total = output.outputs[0].cumulative_logprob
            assert total is not None and math.isfinite(total)
            assert total == pytest.approx(expected.outputs[0].cumulative_logprob)


def test_the_highest_temperature_is_sane(prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=1e4, max_tokens=60, ignore_eos=True, logprobs=0, seed=1)
    with make_llm() as llm:
        (output,) = llm.generate([prompts[0]], params)
    assert len(set(answers(output)[0])) > 30
    assert math.isfinite(output.outputs[0].cumulative_logprob or math.nan)


# ---------------------------------------------------------------------- ends


@pytest.fixture(scope="module")
def llm() -> Any:
    with make_llm() as engine:
        yield engine


@pytest.fixture(scope="module")
def natural(llm: LLM) -> RequestOutput:
    """An answer that ends by itself."""
    (output,) = llm.chat([{"role": "user", "content": SUM}], SamplingParams(temperature=0.0))
    assert output.outputs[0].finish_reason == "stop"
    return output


SUM = "Add these numbers.\n#1 74\n#2 79\nWhat is the sum (#1-#2)? No checks."


def test_ignore_eos_and_min_tokens(llm: LLM, natural: RequestOutput) -> None:
    prompt, answer = natural.prompt_token_ids, natural.outputs[0]
    length, eos = len(answer.token_ids), answer.token_ids[-1]
    more = length + 15
    on, least = llm.generate(
        [prompt] * 2,
        [
            greedy(more),
            SamplingParams(temperature=0.0, max_tokens=200, min_tokens=more, logprobs=3),
        ],
    )
    assert on.outputs[0].token_ids[:length] == answer.token_ids
    assert on.outputs[0].finish_reason == "length" and len(tokens_of(on)) == more
    tokens = tokens_of(least)
    # Until then the end is masked; afterwards it ends the answer again.
    assert tokens[: length - 1] == answer.token_ids[:-1] and eos not in tokens[:more]
    if least.outputs[0].finish_reason == "stop":
        assert tokens[-1] == eos and len(tokens) > more
    # What the model says is reported, not what was masked: the end was its first choice.
    entry = (least.outputs[0].logprobs or [])[length - 1]
    assert entry[eos].rank == 1 and entry[tokens[length - 1]].rank == 2


def test_min_tokens_holds_for_stop_tokens_and_stop_strings(
    llm: LLM, natural: RequestOutput
) -> None:
    prompt, answer = natural.prompt_token_ids, natural.outputs[0]
    fifth = answer.token_ids[4]
    first = answer.token_ids.index(fifth) + 1
    params = {"temperature": 0.0, "max_tokens": 60}
    at_once, masked = llm.generate(
        [prompt] * 2,
        [
            SamplingParams(stop_token_ids=[fifth], **params),
            SamplingParams(stop_token_ids=[fifth], min_tokens=20, **params),
        ],
    )
    assert tokens_of(at_once) == answer.token_ids[:first]
    assert at_once.outputs[0].finish_reason == "stop"
    assert at_once.outputs[0].stop_reason == fifth
    assert fifth not in tokens_of(masked)[:20] and len(tokens_of(masked)) >= 20

    text = answer.text
    stop = text[3:5]
    early, late = llm.generate(
        [prompt] * 2,
        [SamplingParams(stop=stop, **params), SamplingParams(stop=stop, min_tokens=20, **params)],
    )
    assert early.outputs[0].text == text[: text.find(stop)]
    assert early.outputs[0].stop_reason == stop
    assert late.outputs[0].text.startswith(early.outputs[0].text + stop)
    assert len(tokens_of(late)) > 20


@pytest.mark.parametrize("include", [False, True])
def test_what_ends_the_text_is_left_out_or_included(
    include: bool, llm: LLM, natural: RequestOutput
) -> None:
    prompt, answer = natural.prompt_token_ids, natural.outputs[0]
    text, middle = answer.text, len(answer.text) // 2
    stop = text[middle : middle + 3]
    params = [
        SamplingParams(temperature=0.0, include_stop_str_in_output=include, **options)
        for options in (
            {"stop": ["never", stop]},
            {"stop_token_ids": answer.token_ids[3:4]},
            {"skip_special_tokens": False},
            {"skip_special_tokens": True},
        )
    ]
    string, token, shown, skipped = llm.generate([prompt] * 4, params)
    begin = text.find(stop)
    assert string.outputs[0].text == text[: begin + (3 if include else 0)]
    count = len(tokens_of(token))
    tokenizer = llm.get_tokenizer()
    assert token.outputs[0].text == tokenizer.decode(
        answer.token_ids[: count if include else count - 1]
    )
    assert shown.outputs[0].text == text + (tokenizer.eos_token if include else "")
    assert skipped.outputs[0].text == text
    assert tokens_of(shown) == tokens_of(skipped) == answer.token_ids


def test_min_tokens_beyond_the_room_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"min_tokens=5000 .* 3 prompt tokens .* 4093"):
        llm.generate([[5, 6, 7]], SamplingParams(min_tokens=5000))
    assert_empty(llm)


# ---------------------------------------------------------------------- many at once


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"num_kv_blocks": 12}])
def test_n_above_max_num_seqs_completes(options: dict[str, Any]) -> None:
    with make_llm(max_num_seqs=3, **options) as llm:
        prompt = prompt_ids(llm, 2, seed=1)
        params = SamplingParams(temperature=20.0, n=20, max_tokens=12, seed=1, ignore_eos=True)
        many, one = llm.generate([prompt, prompt], [params, greedy(12)])
        assert_empty(llm)
    assert [c.index for c in many.outputs] == list(range(20))
    assert all(c.finish_reason == "length" and len(c.token_ids) == 12 for c in many.outputs)
    assert len({tuple(tokens) for tokens in answers(many)}) == 20
    assert many.usage.completion_tokens == 240 and len(tokens_of(one)) == 12


def test_one_sampling_params_for_each_prompt(llm: LLM) -> None:
    texts = [ledger(1, seed=1), ledger(2, seed=2)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    params = [greedy(5), greedy(9, n=2)]
    for outputs in (llm.generate(texts, params), llm.chat(chats, params)):
        assert [[len(t) for t in answers(output)] for output in outputs] == [[5], [9, 9]]
    last = {o.request_id: o for o in llm.stream(texts, tuple(params))}
    assert [[len(t) for t in answers(output)] for output in last.values()] == [[5], [9, 9]]
    for run in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=r"sampling_params has 3 entries for 2 prompts"):
            run(texts, [*params, params[0]])
    with pytest.raises(RequestError, match=r"sampling_params has 1 entries for 2 prompts"):
        llm.chat(chats, params[:1])
    assert_empty(llm)


# ---------------------------------------------------------------------- impossible logits


def replace_logits(llm: LLM, edit: Any) -> None:
    """Let `edit` change the logits ``[R, V]`` in place, told the rows' hidden states."""
    model = llm.engine.core.runner.model
    head = model.compute_logits

    def edited(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        edit(logits)
        return logits

    model.compute_logits = edited  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "params",
    [
        greedy(20, logprobs=5),
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5),
        SamplingParams(max_tokens=20, ignore_eos=True, top_p=0.9, seed=1),
        SamplingParams(max_tokens=20, ignore_eos=True, top_k=50, min_p=0.01, temperature=5.0),
        SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=2, repetition_penalty=3),
        SamplingParams(max_tokens=20, min_tokens=20, prompt_logprobs=3),
    ],
)
def test_minus_infinity_for_most_tokens(params: SamplingParams) -> None:
    """As models with a padded vocabulary or a built-in grammar have: never chosen, no NaN."""

    def edit(logits: torch.Tensor) -> None:
        keep = logits[:, 40:42].clone()
        logits.fill_(-math.inf)
        logits[:, 40:42] = keep

    with make_llm() as llm:
        replace_logits(llm, edit)
        (output,) = llm.generate([prompt_ids(llm, 2, seed=1)], params)
        assert_empty(llm)
    assert set(tokens_of(output)) <= {40, 41} and len(tokens_of(output)) == 20
    for entry in output.outputs[0].logprobs or ():
        assert set(entry) <= {40, 41}
        assert sum(math.exp(item.logprob) for item in entry.values()) == pytest.approx(1.0)
    for entry in (output.prompt_logprobs or ())[1:]:
        assert entry is not None and not any(math.isnan(i.logprob) for i in entry.values())


@pytest.mark.parametrize(
    ("value", "message"),
    [(-math.inf, "every logit is -inf"), (math.nan, "contain NaN"), (math.inf, "a logit is +inf")],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_unusable_logits_fail_their_request_only(value: float, message: str, drawn: bool) -> None:
    prompts_, params = [], []
    with make_llm() as llm:
        prompts_ = [prompt_ids(llm, 1 + i, seed=i) for i in range(4)]
        params = [
            SamplingParams(max_tokens=15, seed=i, ignore_eos=True, logprobs=1)
            if drawn
            else greedy(15)
            for i in range(4)
        ]
        expected = [llm.generate([p], one)[0] for p, one in zip(prompts_, params, strict=True)]
        step = 0

        def edit(logits: torch.Tensor) -> None:
            nonlocal step
            step += 1
            if step == 6:
                assert len(logits) == 4
                logits[2] = value

        replace_logits(llm, edit)
        outputs = llm.generate(prompts_, params)
        assert_empty(llm)
    for i in (0, 1, 3):
        assert answers(outputs[i]) == answers(expected[i])
    bad = outputs[2]
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None and message in bad.error
    partial = bad.outputs[0]
    assert partial.token_ids == answers(expected[2])[0][: len(partial.token_ids)]
    assert not drawn or len(partial.logprobs or ()) == len(partial.token_ids)
