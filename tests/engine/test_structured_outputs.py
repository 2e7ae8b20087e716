"""Answers of a prescribed form, whatever the schedule."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from tests.engine.small_model import make_small_llm, save_small_model, small_options
from tests.engine.workload import assert_empty, make_llm, prompt_ids
from tests.sampling.tokenizers_for_tests import make_tokenizer
from zipage import AsyncLLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from zipage.engine.client import EngineClient
from zipage.engine.process_client import EngineProcessClient
from zipage.engine.steps import StepRunner
from zipage.execution.grammar import GrammarCompiler, _check_multiples
from zipage.execution.model_runner import ModelRunner
from zipage.tokenizer import load_tokenizer

no_retries = pytest.mark.usefixtures("no_retries")

FORMS = 60
EOS, THINK_END, SEVEN = 2, 4, 13
DIGITS = StructuredOutputsParams(regex="[0-9]+")


@pytest.fixture(scope="module")
def byte_level_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer knows every byte, and merges of them; its vocabulary is padded."""
    path = tmp_path_factory.mktemp("byte-level")
    tokenizer = make_tokenizer("byte_level")
    save_small_model(path, vocab_size=len(tokenizer) + 7, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    return path


# ---------------------------------------------------------------------- random forms


def random_regex(rng: random.Random, alphabet: str, depth: int = 3) -> str:
    """An expression in the syntax that Rust and Python share."""
    if depth == 0:
        few = "".join(rng.sample(alphabet, 3))
        return rng.choice([re.escape(rng.choice(alphabet)), f"[{few}]", f"[{few}]", "[0-9]"])
    parts = [random_regex(rng, alphabet, depth - 1) for _ in range(rng.randint(1, 3))]
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(parts)
    if kind == 1:
        return f"({'|'.join(parts)})"
    low = rng.randint(0, 2)
    return f"({parts[0]}){{{low},{low + rng.randint(1, 3)}}}{''.join(parts[1:])}"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["integer", "boolean", "null", "string", "enum", "array", "object"])
    if depth == 0 and kind in ("array", "object"):
        kind = "enum"
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 6)}
    if kind == "enum":
        return {"enum": [rng.choice(["naïve", "你好", "a b", '"', 7, None]), rng.randint(0, 99)]}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = rng.sample(["x", "the answer", "é", "🙂", "a/b"], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = rng.sample(names, rng.randint(1, len(names)))
        more = {"required": required, "additionalProperties": False}
        return {"type": "object", "properties": properties, **more}
    return {"type": kind}


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value)
            items = schema["items"]
            return (
                fits
                and len(value) <= schema["maxItems"]
                and all(satisfies(v, items) for v in value)
            )
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(satisfies(v, known[name]) for name, v in value.items())
            )
        case "boolean":
            return isinstance(value, bool)
    return value is None


def random_form(rng: random.Random, everything: bool) -> StructuredOutputsParams:
    """A form; of digits, brackets and the like if the vocabulary has not `everything`."""
    if everything and rng.random() < 0.6:
        schema = random_schema(rng)
        compact = rng.random() < 0.8
        given = schema if rng.random() < 0.5 else json.dumps(schema)
        return StructuredOutputsParams(json=given, disable_any_whitespace=compact)  # type: ignore[arg-type]
    alphabet = "abXYZ 0123.é你" if everything else "0123456789.{}"
    if rng.random() < 0.2:
        choices = ["".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(4)]
        return StructuredOutputsParams(choice=choices)
    # At least one character, as an empty answer is no answer.
    return StructuredOutputsParams(regex="[0-9]" + random_regex(rng, alphabet))


def has_form(text: str, form: StructuredOutputsParams) -> bool:
    if form.kind == "json":
        return satisfies(json.loads(text), json.loads(form.text))
    if form.choice is not None:
        return text in form.choice
    assert form.regex is not None
    return re.fullmatch(form.regex, text) is not None


def summary(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None, output.error
    answer = output.outputs[0]
    return answer.token_ids, answer.text, answer.finish_reason


@no_retries
@pytest.mark.parametrize("tokenizer", ["zipage_tiny", "byte_level"])
def test_random_forms(tokenizer: str, small_model: Path, byte_level_model: Path) -> None:
    """Every finished answer has its form, under every schedule the same, and nobody else's answer
    changes."""
    everything = tokenizer == "byte_level"
    path = byte_level_model if everything else small_model
    rng = random.Random(tokenizer)
    forms: list[StructuredOutputsParams | None] = [None] * 6
    forms += [random_form(rng, everything) for _ in range(FORMS)]
    rng.shuffle(forms)
    prompts = [[rng.randrange(6, 300) for _ in range(rng.randint(1, 20))] for _ in forms]
    params = [
        SamplingParams(
            seed=i,
            temperature=rng.choice([0.0, 1.0, 1.5]),
            max_tokens=90,
            structured_outputs=form,
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            ignore_eos=form is None or rng.random() < 0.3,
            min_tokens=rng.choice([0, 0, 3]),
        )
        for i, form in enumerate(forms)
    ]
    with make_small_llm(path, max_num_seqs=32) as llm:
        expected = [summary(output) for output in llm.generate(prompts, params)]
    stopped = 0
    for form, (_, text, reason) in zip(forms, expected, strict=True):
        if form is not None and reason == "stop":
            stopped += 1
            assert has_form(text, form), (form, text)
    assert stopped > 0.9 * FORMS
    tight = {"num_kv_blocks": 13, "admission": "optimistic", "max_num_batched_tokens": 33}
    for options in ({"async_scheduling": True}, {"async_scheduling": True, **tight}, tight):
        with make_small_llm(path, **options) as llm:
            outputs = llm.generate(prompts, params)
            assert (llm.stats().preemptions > 0) is ("num_kv_blocks" in options)
            assert_empty(llm)
        assert [summary(output) for output in outputs] == expected
    others = [i for i, form in enumerate(forms) if form is None]
    with make_small_llm(path) as llm:
        alone = llm.generate([prompts[i] for i in others], [params[i] for i in others])
    assert [summary(output) for output in alone] == [expected[i] for i in others]


@no_retries
def test_a_swapped_answer_goes_on_in_its_form(small_model: Path) -> None:
    """It was compressed before, so that only its exact cache can continue it."""
    form = StructuredOutputsParams(regex="([0-9]{7}\\.){12}")
    params = [SamplingParams(seed=i, max_tokens=100, structured_outputs=form) for i in range(3)]
    late = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, compression="off")
    prompts = [[20 + i, 30 + i] for i in range(4)]
    with make_small_llm(small_model) as llm:
        expected = [summary(output) for output in llm.generate(prompts, [*params, late])]
    assert all(re.fullmatch(form.regex or "", text) for _, text, _ in expected[:3])
    for ahead in (False, True):
        options = {"num_kv_blocks": 10, "admission": "optimistic", "async_scheduling": ahead}
        with make_small_llm(small_model, **options) as llm:
            engine, done = llm.engine, {}
            for i in range(3):
                engine.add_request(prompts[i], params[i], str(i), priority=1)
            while engine.has_unfinished:
                new = "3" not in engine.live_requests and "3" not in done
                if new and engine.core.scheduler.counters.compressions >= 4:
                    engine.add_request(prompts[3], late, "3", priority=0)
                for output in engine.step():
                    done[output.request_id] = output
            assert llm.stats().preemptions_swap > 0
            assert_empty(llm)
        assert [summary(done[str(i)]) for i in range(4)] == expected


@no_retries
def test_nobody_waits_for_a_form(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is queued ahead: the form's token is read while the next forward pass runs."""
    monkeypatch.setattr(StepRunner, "_execute", None)
    params = [SamplingParams(seed=1, max_tokens=20, structured_outputs=DIGITS, ignore_eos=True)]
    params += [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)]
    with make_small_llm(small_model, async_scheduling=True) as llm:
        outputs = llm.generate([[5, 6], [7, 8]], params)
    assert outputs[0].outputs[0].text.isdecimal()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_steps_that_fail_are_repeated(
    small_model: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = StructuredOutputsParams(regex="([0-9]{3}\\.){3}")
    params = [SamplingParams(seed=i, structured_outputs=form, logprobs=1) for i in range(3)]
    with make_small_llm(small_model) as llm:
        expected = [summary(output) for output in llm.generate([[5], [6], [7]], params)]
    calls = 0
    for name in ("launch", "execute"):
        original = getattr(ModelRunner, name)

        def failing(*args: Any, original: Any = original) -> Any:
            nonlocal calls
            calls += 1
            if calls % 4 == 0 and not late:
                raise RuntimeError("no")
            result = original(*args)
            if calls % 4 == 0:
                raise RuntimeError("no")
            return result

        monkeypatch.setattr(ModelRunner, name, failing)
    with make_small_llm(small_model, async_scheduling=True) as llm:
        outputs = llm.generate([[5], [6], [7]], params)
        assert_empty(llm)
    assert calls > 12
    assert [summary(output) for output in outputs] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ahead", [False, True])
def test_cuda(ahead: bool) -> None:
    rng = random.Random(0)
    forms = [random_form(rng, everything=False) for _ in range(24)] + [None] * 4
    params = [
        SamplingParams(seed=i, max_tokens=120, structured_outputs=form, top_k=20, top_p=0.95)
        for i, form in enumerate(forms)
    ]
    with make_llm(device="cuda", async_scheduling=ahead) as llm:
        outputs = llm.generate([prompt_ids(llm, 2, i) for i in range(len(forms))], params)
        assert_empty(llm)
    finished = [o.outputs[0].finish_reason == "stop" for o in outputs]
    for form, output in zip(forms, outputs, strict=True):
        assert output.error is None, output.error
        if form is not None and output.outputs[0].finish_reason == "stop":
            assert has_form(output.outputs[0].text, form)
    assert sum(finished) > 20


# ---------------------------------------------------------------------- what ends an answer


def answer(path: Path, **options: Any) -> tuple[list[int], str, str | None, int | str | None]:
    options.setdefault("structured_outputs", DIGITS)
    with make_small_llm(path) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(seed=3, **options))
        assert output.error is None, output.error
        one = output.outputs[0]
        return one.token_ids, one.text, one.finish_reason, one.stop_reason


def test_the_end_comes_where_the_form_is_satisfied(small_model: Path) -> None:
    eager = {EOS: 100.0}
    ids, text, reason, _ = answer(small_model, logit_bias=eager, max_tokens=20)
    assert (len(ids), ids[-1], len(text), reason) == (2, EOS, 1, "stop")
    ids, text, reason, _ = answer(small_model, logit_bias=eager, max_tokens=20, min_tokens=6)
    assert (len(ids), ids[-1], len(text), reason) == (7, EOS, 6, "stop")
    ids, text, reason, _ = answer(small_model, logit_bias=eager, max_tokens=9, ignore_eos=True)
    assert (len(ids), len(text), reason) == (9, 9, "length")
    four = StructuredOutputsParams(regex="[0-9]{4}")
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 8}, {"max_tokens": 4}):
        ids, text, reason, _ = answer(small_model, structured_outputs=four, **more)
        assert (len(ids), len(text), reason) == (4, 4, "stop")
    assert answer(small_model, structured_outputs=four, max_tokens=3)[2] == "length"


#: Two digits, then what zipage-tiny cannot write, or the end.
ONLY_AN_END = [
    {"structured_outputs": StructuredOutputsParams(regex='[0-9]{2}("x)?')},
    {"structured_outputs": StructuredOutputsParams(choice=["57", '57"'])},
]


@pytest.mark.parametrize("form", ONLY_AN_END, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("options", "ends", "stop_reason"),
    [
        ({}, [EOS], None),
        ({"min_tokens": 8}, [EOS], None),
        ({"min_tokens": 3}, [EOS], None),
        ({"min_tokens": 8, "ignore_eos": True}, [EOS], None),
        ({"ignore_eos": True}, [EOS], None),
        ({"min_tokens": 8, "stop_token_ids": [300], "logit_bias": {300: 90.0}}, [300], 300),
        ({"ignore_eos": True, "stop_token_ids": [300]}, [300], 300),
    ],
    ids=str,
)
def test_the_form_comes_before_min_tokens(
    small_model: Path,
    form: dict[str, Any],
    ahead: bool,
    options: dict[str, Any],
    ends: list[int],
    stop_reason: int | None,
) -> None:
    params = SamplingParams(seed=3, max_tokens=20, **options, **form)
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        (output,) = llm.generate([[5, 6, 7]], params)
        assert_empty(llm)
    assert output.error is None, output.error
    (one,) = output.outputs
    assert (len(one.text), one.text.isdigit(), one.finish_reason) == (2, True, "stop")
    assert (one.token_ids[2:], one.stop_reason) == (ends, stop_reason)


def test_min_tokens_hold_while_the_form_can_go_on(small_model: Path) -> None:
    bias = {EOS: 100.0, 300: 100.0}
    for more in ({}, {"stop_token_ids": [300]}):
        ids, text, reason, _ = answer(small_model, logit_bias=bias, min_tokens=6, **more)
        assert (len(ids), len(text), reason) == (7, 6, "stop")


def test_stop_tokens_and_strings(small_model: Path) -> None:
    eager: dict[str, Any] = {"logit_bias": {SEVEN: 100.0}, "max_tokens": 9}
    ids, text, reason, stop = answer(small_model, stop_token_ids=[SEVEN], **eager)
    assert (len(ids), len(text), reason, stop) == (2, 1, "stop", SEVEN) and ids[0] != SEVEN
    ids, text, reason, stop = answer(small_model, stop=["77"], **eager)
    assert (text, reason, stop) == ("", "stop", "77") and len(ids) == 2
    words = dict.fromkeys(range(106, 130), 100.0)
    assert answer(small_model, logit_bias=words, max_tokens=9)[1].isdecimal()


def test_the_form_begins_after_the_reasoning(small_model: Path) -> None:
    form = StructuredOutputsParams(regex="[0-9]{3}", reasoning_end_token_ids=[THINK_END])
    bias = {EOS: 100.0, THINK_END: 6.0}
    ids, text, reason, _ = answer(
        small_model, structured_outputs=form, logit_bias=bias, max_tokens=400
    )
    end = ids.index(THINK_END)
    assert end > 0 and len(ids) == end + 4 and EOS not in ids and reason == "stop"
    before, after = text.split("</think>")
    assert re.fullmatch("[0-9]{3}", after) and not re.fullmatch("[0-9]*", before)
    pair = StructuredOutputsParams(regex="[0-9]{3}", reasoning_end_token_ids=[SEVEN, THINK_END])
    bias = {SEVEN: 50.0}
    ids, _, reason, _ = answer(
        small_model, structured_outputs=pair, logit_bias=bias, max_tokens=30, ignore_eos=True
    )
    assert ids == [SEVEN] * 30 and reason == "length"


@no_retries
def test_completions_have_states_of_their_own(small_model: Path) -> None:
    form = StructuredOutputsParams(regex="[0-9]{2,6}\\.[0-9]{2}")
    with make_small_llm(small_model) as llm:
        (both,) = llm.generate([[9, 8]], SamplingParams(n=4, seed=5, structured_outputs=form))
        texts = [one.text for one in both.outputs]
        for i in range(4):
            params = SamplingParams(seed=5 + i, structured_outputs=form)
            assert llm.generate([[9, 8]], params)[0].outputs[0].text == texts[i]
    assert len(set(texts)) > 2 and all(re.fullmatch(form.regex or "", text) for text in texts)


# ---------------------------------------------------------------------- refusals

ILLEGAL: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "exactly one"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": ""}, "not empty"),
    ({"regex": "(a|b)?{0}"}, "empty text"),
    ({"regex": "qqq"}, "no token"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": "{"}, "JSON schema"),
    ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
    ({"json": {"enum": []}}, "nsatisfiable"),
    ({"json": 7}, "JSON schema"),
    ({"choice": []}, "list of strings"),
    ({"choice": "ab"}, "list of strings"),
    ({"grammar": "start: missing"}, "missing"),
    ({"regex": "[0-9]", "reasoning_end_token_ids": [400]}, "400"),
    ({"regex": "[0-9]", "reasoning_end_token_ids": []}, "reasoning_end_token_ids"),
    ({"regex": "[0-9]", "whitespace": True}, "whitespace"),
    ({"regex": "1" * 300_000}, "262144"),
]


def test_bad_forms_are_refused(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        for options, word in ILLEGAL:
            for _ in range(2):  # once more, from the cache
                with pytest.raises(RequestError) as caught:
                    llm.generate([[5]], SamplingParams.from_dict({"structured_outputs": options}))
                assert word in str(caught.value), options
        assert_empty(llm)


WRITTEN: list[tuple[dict[str, Any], str, tuple[bool, bool]]] = [
    # How JSON is written, and whether it is legal with and without white space.
    ({"separators": (",", ":")}, "", (True, True)),
    ({}, "", (True, False)),
    ({"indent": 2}, "", (True, False)),
    ({"indent": 16}, "", (True, False)),
    ({"indent": "\t"}, "", (True, False)),
    ({"separators": (" , ", " : ")}, "", (True, False)),
    ({"separators": (",  ", ": ")}, "", (False, False)),
    ({"separators": (",\n\n", ":")}, "", (False, False)),
    ({"separators": (",\n" + 65 * " ", ":")}, "", (False, False)),
    ({"separators": (",", ":")}, " ", (False, False)),
]


@pytest.mark.parametrize(("style", "tail", "legal"), WRITTEN, ids=str)
def test_white_space_of_json(
    style: dict[str, Any], tail: str, legal: tuple[bool, bool], byte_level_model: Path
) -> None:
    value = {"a": [1, {"b": []}], "c": {"d": "x  y"}, "e": 0.5}
    text = json.dumps(value, **style) + tail
    tokenizer = load_tokenizer(str(byte_level_model))
    compiler = GrammarCompiler(lambda: tokenizer, len(tokenizer), [])
    for schema in ({"type": "object"}, {"type": "object", "x-guidance": {}}):
        for compact, wanted in zip((False, True), legal, strict=True):
            form = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
            parser = compiler.compile(form).deep_copy()
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert (parser.consume_tokens(ids) and parser.is_accepting()) is wanted


def test_a_schema_may_say_what_white_space_it_has(byte_level_model: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level_model))
    compiler = GrammarCompiler(lambda: tokenizer, len(tokenizer), [])
    for own, text in (
        ({"whitespace_pattern": "_"}, '{_"a":_1}'),
        ({"whitespace_flexible": False}, '{"a":1}'),
        ({"whitespace_flexible": True}, '{ "a": 1}'),
    ):
        form = StructuredOutputsParams(json={**OBJECT, "required": ["a"], "x-guidance": own})
        ids = tokenizer.encode(text, add_special_tokens=False)
        parser = compiler.compile(form).deep_copy()
        assert parser.consume_tokens(ids) and parser.is_accepting()
        spaced = tokenizer.encode('{ "a":1}', add_special_tokens=False)
        assert compiler.compile(form).deep_copy().consume_tokens(spaced) is (
            own == {"whitespace_flexible": True}
        )
    compiler.compile(StructuredOutputsParams(json={"type": "object", "x-guidance": 5}))


def test_a_model_cannot_go_on_with_white_space(byte_level_model: Path) -> None:
    """However much it likes to."""
    tokenizer = load_tokenizer(str(byte_level_model))
    liked = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip(" \n\t\r") == ""]
    params = SamplingParams(
        seed=0,
        logit_bias=dict.fromkeys(liked, 100.0),
        max_tokens=300,
        structured_outputs={"json": {**OBJECT, "required": ["a"]}},  # type: ignore[arg-type]
    )
    with make_small_llm(byte_level_model, max_model_len=512) as llm:
        answer = llm.generate([[5]], params)[0].outputs[0]
    # Three places, of 65 characters each.
    assert answer.finish_reason == "stop" and answer.text.count(" ") <= 3 * 65
    assert isinstance(json.loads(answer.text)["a"], int)


#: What zipage-tiny's vocabulary, without quotation marks and brackets, cannot write, and why.
INTEGER = {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": INTEGER}}
UNWRITABLE: list[tuple[dict[str, Any], str]] = [
    ({"json": {**OBJECT, "required": ["a"]}}, "has '\"', which it needs"),
    ({"json": {"type": "string"}}, "has '\"', which it needs"),
    ({"json": {"type": "array", "items": INTEGER}}, "has '[', which it needs"),
    ({"json": {"enum": ["a", [1]]}}, "has '\"' or '[', one of which it needs"),
    ({"regex": "[0-9]q"}, "has 'q', which it needs"),
    ({"choice": ["a你好"]}, "has '你', which it needs"),
    ({"choice": ["é", "à"]}, "begins with c3, which it needs"),
    ({"regex": '[!"$%&q]'}, "'!' or '\"' or '$' or one of 3 others, one of which it needs"),
    ({"grammar": 'start: "1" "\\"" start'}, "has '\"', which it needs"),
    ({"json": {"const": None}}, "can begin it"),
]


@pytest.mark.parametrize(("form", "reason"), UNWRITABLE, ids=str)
def test_what_the_vocabulary_lacks_is_named(
    form: dict[str, Any], reason: str, small_model: Path
) -> None:
    with make_small_llm(small_model) as llm, pytest.raises(RequestError) as caught:
        llm.generate([[5]], SamplingParams.from_dict({"structured_outputs": form}))
    (kind,) = form
    begin = f"structured_outputs.{kind} cannot be written by this model: no token of its vocabulary"
    assert str(caught.value).startswith(begin) and str(caught.value).endswith(reason)


@pytest.mark.parametrize(
    ("grammar", "ids"),
    [
        ('start: "1" <[5]>', [7, 5]),
        ("start: <[300]>", [300]),
        ('start: "q" | <[5-9]> <[300,301]>', [8, 301]),
        ('start: "1" | "q" <|im_end|>', [7]),
        ('start: "<[" | "1"', [7]),
    ],
)
def test_tokens_may_be_asked_for_by_their_ids(
    grammar: str, ids: list[int], small_model: Path
) -> None:
    """They need no characters, even where their ids are those of bytes that no token has."""
    with make_small_llm(small_model) as llm:
        form = StructuredOutputsParams(grammar=grammar)
        parser = llm.engine.inputs.grammars.compile(form).deep_copy()
    assert parser.consume_tokens(ids) and parser.is_accepting()


@pytest.mark.parametrize("json_schema", [OBJECT, INTEGER, {"anyOf": [{"type": "string"}, INTEGER]}])
def test_what_one_way_can_write_is_legal(json_schema: Any, small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        llm.engine.inputs.grammars.compile(StructuredOutputsParams(json=json_schema))


@pytest.mark.parametrize("reasons", [False, True])
def test_a_dead_end_names_what_is_missing(small_model: Path, reasons: bool) -> None:
    end = {"reasoning_end_token_ids": [THINK_END]} if reasons else {}
    form: Any = {"regex": "[0-9]{30}quit", **end}
    params = SamplingParams(seed=1, logit_bias={THINK_END: 50.0}, structured_outputs=form)
    with make_small_llm(small_model) as llm:
        error = llm.generate([[5]], params)[0].error
    assert error is not None and error.endswith("which must go on with 'quit'")


def test_a_known_form_waits_for_no_other(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_small_llm(small_model) as llm:
        grammars = llm.engine.inputs.grammars
        known = grammars.compile(DIGITS)
        begun, release = threading.Event(), threading.Event()
        released: list[bool] = []
        compile_form = grammars._compile

        def slow(form: StructuredOutputsParams) -> Any:
            begun.set()
            released.append(release.wait(10))
            return compile_form(form)

        monkeypatch.setattr(grammars, "_compile", slow)
        other = StructuredOutputsParams(regex="[0-9]{2}")
        threads = [threading.Thread(target=grammars.compile, args=(other,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert begun.wait(20)
        assert grammars.compile(DIGITS) is known
        release.set()
        for thread in threads:
            thread.join()
        assert released == [True]  # both wanted the same, which was compiled once


def test_boolean_schemas(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        params = SamplingParams(seed=0, max_tokens=40, structured_outputs={"json": "true"})  # type: ignore[arg-type]
        assert llm.generate([[5]], params)[0].error is None
        with pytest.raises(RequestError, match=r"structured_outputs\.json"):
            llm.generate([[5]], SamplingParams.from_dict({"structured_outputs": {"json": "false"}}))


def test_without_the_package(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with make_small_llm(small_model) as llm, pytest.raises(RequestError, match="structured"):
        llm.generate([[5]], SamplingParams(structured_outputs=DIGITS))


def test_ordinary_multiples_are_taken(small_model: Path) -> None:
    steps: list[Any] = [1, 7, 365, 0.01, 0.25, 1.5, 1000, 10**12, 10007, 0, True]
    schema = {
        "properties": {str(i): {"type": "number", "multipleOf": m} for i, m in enumerate(steps)}
    }
    _check_multiples(schema)
    _check_multiples(
        {"allOf": [{"multipleOf": 12}, {"multipleOf": 30}], "x": schema["properties"]["3"]}
    )
    for more in (100_003, 1.000_003, 10**30 + 1):
        with pytest.raises(ValueError, match="multipleOf"):
            _check_multiples({"items": [schema, {"multipleOf": more}]})


def test_large_forms_are_bounded(small_model: Path) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
    forms = [
        {"regex": "((([0-9]|1)*2){1,1000}3){1,1000}"},
        {"regex": "([0-9]{1,50}){1,5000}x"},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**6}}},
        {"choice": [str(i) for i in range(20_000)]},
        {"grammar": "start: a\n" + "\n".join(f'a{"x" * i}: "1"' for i in range(300))},
        {"json": {"type": "integer", "multipleOf": 9_999_991}},
        {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"}},
        {"json": {"anyOf": [{"type": "integer", "multipleOf": 9973 + 2 * i} for i in range(999)]}},
        {"grammar": 'start: %json {"type": "integer", "multiple\\u004ff": 9999991}'},
    ]
    with make_small_llm(small_model) as llm:
        for form in forms:
            begun = time.perf_counter()
            params = SamplingParams.from_dict({"structured_outputs": form, "max_tokens": 5})
            try:
                (output,) = llm.generate([[5]], params)
            except RequestError:
                pass
            else:
                assert output.finished
            assert time.perf_counter() - begun < 10
        assert_empty(llm)


@pytest.mark.parametrize("make", [AsyncLLM, EngineProcessClient])
def test_clients(small_model: Path, make: Callable[..., EngineClient]) -> None:
    """On a thread, and with the engine in a process of its own."""
    forms: list[dict[str, Any]] = [
        {"regex": "[0-9]{5}"},
        {"choice": ["123", "4.5"]},
        {"json": {"type": "integer", "minimum": 100, "maximum": 999}},
        {"regex": "[0-9]{4}", "reasoning_end_token_ids": [THINK_END]},
    ]

    async def run() -> tuple[list[str], str]:
        llm = make(**small_options(small_model))
        texts = []
        try:
            for form in forms:
                bias = {THINK_END: 100.0}
                good = {"seed": 1, "logit_bias": bias, "structured_outputs": form}
                async for output in llm.generate([5], SamplingParams.from_dict(good)):
                    assert output.error is None
                texts.append(output.outputs[0].text)
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
            with pytest.raises(RequestError) as caught:
                async for _ in llm.generate([5], bad):
                    pass
            return texts, str(caught.value)
        finally:
            llm.shutdown()

    (number, choice, whole, reasoned), refusal = asyncio.run(run())
    assert re.fullmatch("[0-9]{5}", number) and choice in ("123", "4.5")
    assert re.fullmatch("[1-9][0-9]{2}", whole)
    assert re.fullmatch("</think>[0-9]{4}", reasoned) and "unclosed group" in refusal
