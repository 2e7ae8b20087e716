"""Whatever a user gets wrong is refused at submission, by name, value and what is legal, and
nobody else notices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.engine.small_model import make_small_llm, small_options
from tests.engine.workload import assert_empty, greedy, tokens_of
from zipage import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    ModelError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from zipage.engine.core_io import EngineRequest
from zipage.engine.messages import Start, Submit, decode_to_engine, encode
from zipage.errors import ZipageError, shown
from zipage.execution.model_runner import resolve_device
from zipage.llm import OutputStream

GOOD = [11, 12, 13, 14, 15]
#: More than the pool's 40 blocks, less than the model's length.
TOO_LONG_FOR_THE_POOL = [5] * 700


class Bystander:
    """A request that runs while others are refused, and must not notice."""

    def __init__(self, path: Path) -> None:
        self.llm = make_small_llm(path, num_kv_blocks=40)
        (alone,) = self.llm.generate([GOOD], greedy(80))
        self.expected = alone.outputs[0]

    def watches(self, *calls: Callable[[], None]) -> None:
        """Run `calls` in the middle of the request; nothing may be queued by them."""
        with contextlib.closing(self.llm.stream([GOOD], greedy(80))) as stream:
            self._watch(stream, calls)
        assert_empty(self.llm)

    def _watch(self, stream: OutputStream, calls: Sequence[Callable[[], None]]) -> None:
        queued = len(self.llm.engine.core.scheduler.requests)
        outputs = [next(stream) for _ in range(3)]
        for call in calls:
            call()
            assert self.llm.engine.live_requests == {outputs[0].request_id}
            assert len(self.llm.engine.core.scheduler.requests) == queued
            outputs.append(next(stream))
        outputs += stream
        answer = outputs[-1].outputs[0]
        assert tokens_of(outputs[-1]) == self.expected.token_ids
        assert answer.text == self.expected.text


@pytest.fixture(scope="module")
def bystander(small_model: Path) -> Iterator[Bystander]:
    watching = Bystander(small_model)
    yield watching
    watching.llm.shutdown()


def says(error: BaseException, words: str) -> None:
    for word in words.split("|"):
        assert word in str(error), f"{word!r} is not in: {error}"


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt|empty|at least one token"),
    ([], "prompt|empty|at least one token"),
    ([5, 320], "prompt_token_ids|320|0 to 319"),
    ([5, 10**30], f"prompt_token_ids|{10**30}|0 to 319"),
    ([5, -1], "prompt_token_ids|-1|0 to 319"),
    ([5, np.int64(-3)], "prompt_token_ids|-3|0 to 319"),
    ([True, 5], "prompt_token_ids|True|integer"),
    ([5, np.True_], "prompt_token_ids|True|integer"),
    ([5, 6.0], "prompt_token_ids|6.0|integer"),
    ([5, math.nan], "prompt_token_ids|nan|integer"),
    ([5, None], "prompt_token_ids|None|integer"),
    ([[5, 6], [7]], "prompt_token_ids|[5, 6]|integer"),
    (np.zeros((2, 3), dtype=np.int64), "prompt_token_ids|[0, 0, 0]|integer"),
    ([5, "six"], "prompt_token_ids|'six'|integer"),
    (b"bytes", "prompt|bytes|text or token ids"),
    (None, "prompt|NoneType|text or token ids"),
    (3.5, "prompt|float|text or token ids"),
    ("lone \ud800 surrogate", "prompt|U+D800|valid Unicode"),
    ({}, "prompt|'prompt'|'prompt_token_ids'"),
    ({"text": "x"}, "prompt|text|'prompt'|'prompt_token_ids'"),
    ({"prompt": 5}, "prompt|int|text or token ids"),
    ({"prompt": 5, "prompt_token_ids": [5]}, "prompt=5|must be text"),
    ({"prompt_token_ids": "five"}, "prompt_token_ids='five'|list of token ids"),
    ({"prompt_token_ids": None}, "prompt|NoneType|text or token ids"),
    ([5] * 1024, "1024 tokens|max_model_len=1024"),
    (TOO_LONG_FOR_THE_POOL, "700 prompt tokens|44 blocks|pool has 40|raise|bounded_prefill"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda v: shown(v)[:24])
def test_bad_prompts(bystander: Bystander, prompt: Any, words: str) -> None:
    def submit() -> None:
        with pytest.raises(RequestError) as caught:
            bystander.llm.engine.add_request(prompt, greedy(5))
        says(caught.value, words)

    def among_good_ones() -> None:
        with pytest.raises(RequestError) as caught:
            bystander.llm.generate([GOOD, prompt], greedy(5))
        says(caught.value, words)

    bystander.watches(submit, among_good_ones)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([""], "prompt is empty"),
        ("", "prompt is empty"),
        ([[]], "prompt is empty"),
        (["fine", ""], "prompt is empty"),
        (7, "prompts|int|list"),
        ({"prompt": ""}, "prompt is empty"),
        (None, "prompts|NoneType|list"),
    ],
)
def test_bad_prompt_lists(bystander: Bystander, prompts: Any, words: str) -> None:
    def submit() -> None:
        with pytest.raises(RequestError) as caught:
            bystander.llm.generate(prompts, greedy(5))
        says(caught.value, words)

    bystander.watches(submit)
    assert bystander.llm.generate([]) == []


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {320: 1.0}}, "logit_bias|320|0 to 319"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias|-1|integers"),
    ({"logit_bias": {5: math.nan}}, "logit_bias[5]|nan|-100 to 100"),
    ({"stop_token_ids": [320]}, "stop_token_ids|320|0 to 319"),
    ({"stop_token_ids": [-2]}, "stop_token_ids|-2|integers from 0"),
    ({"stop_token_ids": [2.0]}, "stop_token_ids|2.0|integers from 0"),
    ({"max_tokens": 0}, "max_tokens=0|1 to"),
    ({"max_tokens": -5}, "max_tokens=-5|1 to"),
    ({"max_tokens": 1020}, "max_tokens=1020|max_model_len=1024|at most 1019"),
    ({"max_tokens": 10**9}, "max_tokens=1000000000|at most 1019"),
    ({"max_tokens": 900, "compression": "off"}, "up to 900|57 blocks|pool has 40|kv_budget"),
    ({"temperature": math.nan}, "temperature=nan|0 to 10000"),
    ({"temperature": math.inf}, "temperature=inf|0 to 10000"),
    ({"temperature": -0.1}, "temperature=-0.1|0 to 10000"),
    ({"temperature": 10**400}, "temperature=1000|0 to 10000"),
    ({"top_p": 0.0}, "top_p=0.0|above 0, at most 1"),
    ({"top_p": 1.01}, "top_p=1.01|above 0, at most 1"),
    ({"top_p": -0.5}, "top_p=-0.5|above 0, at most 1"),
    ({"top_p": math.nan}, "top_p=nan|above 0, at most 1"),
    ({"n": 0}, "n=0|1 to 1024"),
    ({"n": 10**9}, "n=1000000000|1 to 1024"),
    ({"n": 10**5000}, "n=<int>|1 to 1024"),
    ({"n": True}, "n=True|1 to 1024"),
    ({"stop": ""}, "stop=''|none of them empty"),
    ({"stop": ["x", ""]}, "stop=''|none of them empty"),
    ({"stop": [str(i) for i in range(1025)]}, "stop=|at most 1024 strings"),
    ({"stop": ["x" * 70_000]}, "stop=|65536 characters"),
    ({"logprobs": 321}, "logprobs=321|320"),
    ({"kv_budget": 24}, "kv_budget=24|multiple of block_size=16"),
    ({"kv_budget": 0}, "kv_budget=0|1 to"),
    ({"kv_budget": 16 * 10**6}, "64 blocks|pool has 40|lower kv_budget"),
    ({"kv_budget": 32, "compression": "off"}, "kv_budget=32|None when compression"),
    ({"compression": np.array([1, 2])}, 'compression=array|"on", "off" or None'),
]


@pytest.mark.parametrize(("options", "words"), BAD_PARAMS, ids=lambda v: shown(v)[:32])
def test_bad_sampling_options(bystander: Bystander, options: dict[str, Any], words: str) -> None:
    if options.get("kv_budget") == 16 * 10**6:
        options = {**options, "max_tokens": 1019}

    def submit() -> None:
        with pytest.raises(RequestError) as caught:
            bystander.llm.generate([GOOD], SamplingParams(**options))
        says(caught.value, words)

    bystander.watches(submit)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": "high"}, "priority='high'|integer"),
        ({"priority": True}, "priority=True|integer"),
        ({"priority": 2**63}, "priority=9223372036854775808|64-bit"),
        ({"request_id": 5}, "request_id=5|string"),
        ({"request_id": ["a"]}, "request_id=['a']|string"),
        ({"cache_salt": None}, "cache_salt=None|string"),
        ({"cache_salt": "\ud800"}, "cache_salt=|valid Unicode"),
        ({"params": None}, "SamplingParams|NoneType"),
        ({"params": {"n": 1}}, "SamplingParams|dict"),
    ],
)
def test_bad_submissions(bystander: Bystander, options: dict[str, Any], words: str) -> None:
    def submit() -> None:
        with pytest.raises(RequestError) as caught:
            bystander.llm.engine.add_request(**{"prompt": GOOD, "params": greedy(5), **options})
        says(caught.value, words)

    bystander.watches(submit)


def test_taken_request_id_is_refused(bystander: Bystander) -> None:
    engine = bystander.llm.engine
    engine.add_request(GOOD, greedy(5), "mine")
    with pytest.raises(RequestError, match="'mine' is already in use"):
        engine.add_request(GOOD, greedy(5), "mine")
    engine.abort("mine")
    assert_empty(bystander.llm)


def test_unknown_options_are_named(small_model: Path, bystander: Bystander) -> None:
    """By their constructors as Python does it, elsewhere with what is meant."""
    with pytest.raises(ConfigError, match="'kv_buget'; did you mean kv_budget"):
        LLM(**small_options(small_model), kv_buget=64)
    with pytest.raises(ConfigError, match="'kv_buget'; did you mean kv_budget"):
        AsyncLLM(**small_options(small_model), kv_buget=64)
    with pytest.raises(TypeError, match="kv_buget"):
        EngineConfig(kv_buget=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="'max_token'; did you mean max_tokens"):
        SamplingParams.from_dict({"max_token": 5})
    with pytest.raises(ConfigError, match=r"no option 'lamda'; legal are .*lam"):
        LLM(**small_options(small_model, policy_options={"lamda": 0.5}))
    with pytest.raises(TypeError, match="max_new_tokens"):
        bystander.llm.generate([GOOD], greedy(5), max_new_tokens=5)  # type: ignore[call-arg]


# ---------------------------------------------------------------------- unusual, but legal


def test_integers_of_other_libraries_are_integers(bystander: Bystander) -> None:
    llm = bystander.llm
    plain = bystander.expected.token_ids[:20]
    for ids in ([np.int32(i) for i in GOOD], tuple(GOOD), np.array(GOOD)):
        params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(20), ignore_eos=True)
        (output,) = llm.generate([ids], params, priority=np.int8(1))
        assert tokens_of(output) == plain
        assert all(type(i) is int for i in output.prompt_token_ids)
    (output,) = llm.generate([np.int64(i) for i in GOOD], greedy(20))
    assert tokens_of(output) == plain, "a list of numpy integers is one prompt"


@pytest.mark.parametrize("temperature", [1e-5, 1.1e-5, 1e-4])
def test_tiny_temperatures_take_the_likeliest_token(
    bystander: Bystander, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, top_p=0.9)
    (output,) = bystander.llm.generate([GOOD], params)
    assert tokens_of(output) == bystander.expected.token_ids[:40]


def test_more_answers_than_the_batch_holds(bystander: Bystander) -> None:
    params = dataclasses.replace(greedy(10), n=21)
    assert bystander.llm.config.max_num_seqs == 8
    (output,) = bystander.llm.generate([GOOD], params)
    assert output.finished and output.error is None
    expected = bystander.expected.token_ids[:10]
    assert [answer.token_ids for answer in output.outputs] == [expected] * 21


def test_prompt_larger_than_the_pool_blocks_nobody(bystander: Bystander) -> None:
    """It is refused at once, alone or in a queue, instead of waiting for ever."""
    llm = bystander.llm
    for i in range(3):
        llm.engine.add_request(GOOD, greedy(80), f"before{i}")
    with pytest.raises(RequestError, match="can never fit"):
        llm.engine.add_request(TOO_LONG_FOR_THE_POOL, greedy(5), "large")
    for i in range(9):
        llm.engine.add_request(GOOD, greedy(80), f"after{i}")
    done = {}
    for _ in range(2000):
        if not llm.engine.has_unfinished:
            break
        done |= {o.request_id: tokens_of(o) for o in llm.engine.step()}
    assert len(done) == 12 and "large" not in done
    assert all(tokens == bystander.expected.token_ids for tokens in done.values())


def test_longest_legal_answer_ends(bystander: Bystander) -> None:
    """`max_tokens` at its limit, and left out, both end at the model's length."""
    for params in (greedy(1019), SamplingParams(temperature=0.0, ignore_eos=True)):
        (output,) = bystander.llm.generate([GOOD], params)
        assert len(tokens_of(output)) == 1019
        assert output.outputs[0].finish_reason == "length"


# ---------------------------------------------------------------------- engine options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 24}, "block_size=24|multiple of 16"),
        ({"block_size": 8}, "block_size=8|>= 16"),
        ({"block_size": 16.0}, "block_size=16.0|integer"),
        # The window and one block of new tokens need N_max * b = kv_budget + b slots.
        ({"kv_budget": 16, "window": 16, "num_sinks": 1}, "kv_budget=16|at least 32|window of 16"),
        ({"kv_budget": -16}, "kv_budget=-16|at least 16"),
        ({"kv_budget": True}, "kv_budget=True|multiple of"),
        ({"window": 17}, "window=17|<= 16"),
        ({"max_num_seqs": 10**12}, "max_num_seqs=1000000000000|65536"),
        ({"num_kv_blocks": 10**8, "max_num_seqs": 1}, "100000000 blocks|lower num_kv_blocks"),
        ({"num_kv_blocks": 10**30}, "num_kv_blocks=1000000|<="),
        ({"num_kv_blocks": None, "kv_cache_memory": "9" * 400}, "kv_cache_memory|below 2**63"),
        ({"num_kv_blocks": None, "kv_cache_memory": math.nan}, "kv_cache_memory=nan|not a size"),
        ({"memory_utilization": math.nan}, "memory_utilization=nan|(0, 1]"),
        ({"seed": 2**70}, "seed=|<="),
        ({"model": 5}, "model=5|path"),
        ({"model": ""}, "model=''|path"),
        ({"tokenizer": 5}, "tokenizer=5|path"),
        ({"dtype": torch.float32}, "dtype=torch.float32|legal are auto"),
        ({"dtype": np.array([1, 2])}, "dtype=array|legal are auto"),
        ({"compression": ["zipage"]}, "compression=['zipage']|unknown policy"),
        ({"policy_options": [1]}, "policy_options=[1]|mapping"),
        ({"policy_options": {"redundancy": np.array([1, 2])}}, "redundancy|lightning"),
        ({"attention_backend": "flash"}, "attention_backend='flash'|native"),
        ({"admission": None}, "admission=None|bounded"),
        ({"async_compression": 1}, "async_compression=1|True or False"),
    ],
)
def test_bad_engine_options(small_model: Path, options: dict[str, Any], words: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        make_small_llm(small_model, **options)
    says(caught.value, words)
    assert set(threading.enumerate()) == before


def test_smallest_budget_works(small_model: Path) -> None:
    """A window that fills the budget: each compression keeps just the window."""
    with make_small_llm(small_model, kv_budget=16, window=16) as llm:
        (output,) = llm.generate([GOOD], greedy(100))
        assert len(tokens_of(output)) == 100
        assert output.metrics.peak_blocks == 2 and output.metrics.compressions == 5
        assert_empty(llm)


# ---------------------------------------------------------------------- model directories


def damaged(source: Path, target: Path, damage: str) -> Path:
    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "no config":
        (target / "config.json").unlink()
    else:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    return target


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "model.safetensors"),
        ("truncated", "model.safetensors|truncated"),
        ("empty", "model.safetensors|truncated"),
        ("wrong shape", "wrong shape|expected [64, 32]"),
        ("no config", "config.json"),
    ],
)
def test_damaged_models_are_refused_cleanly(
    small_model: Path, tmp_path: Path, damage: str, words: str
) -> None:
    path = damaged(small_model, tmp_path / "model", damage)
    before = set(threading.enumerate())
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ModelError) as caught:
            kind(**small_options(path, async_compression=True))
        says(caught.value, words)
    assert set(threading.enumerate()) == before


def test_directory_without_a_tokenizer(small_model: Path, tmp_path: Path) -> None:
    """The first request is refused, as its answer could not be decoded."""
    path = tmp_path / "model"
    shutil.copytree(small_model, path)
    for file in path.glob("tokenizer*"):
        file.unlink()
    with make_small_llm(path) as llm:
        for prompt in ("text", GOOD):
            with pytest.raises(ModelError, match=r"tokenizer of model=.*tokenizer\.json"):
                llm.generate([prompt], greedy(5))
            assert_empty(llm)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            llm.chat([{"role": "user", "content": "hi"}])
    with make_small_llm(path, tokenizer=str(small_model)) as llm:
        assert len(tokens_of(llm.generate(["text"], greedy(5))[0])) == 5


def test_tokenizer_without_template_or_bos(small_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(small_model, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    for key in ("chat_template", "bos_token"):
        config.pop(key, None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with make_small_llm(path) as llm:
        assert llm.get_tokenizer().bos_token is None
        with pytest.raises(RequestError, match="no chat template; send a plain prompt"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert_empty(llm)
        (output,) = llm.generate(["How much is 5?"], greedy(5))
        assert len(tokens_of(output)) == 5
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == "How much is 5?"


# ---------------------------------------------------------------------- logits


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_unusable_logits_fail_their_request_only(small_model: Path, value: float) -> None:
    causes = {-math.inf: "every logit is -inf", math.nan: "NaN", math.inf: r"a logit is \+inf"}
    with make_small_llm(small_model) as llm:
        (alone,) = llm.generate([GOOD], greedy(30))
        model = llm.engine.core.runner.model
        compute, calls = model.compute_logits, 0

        def compute_logits(rows: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            logits = compute(rows)
            calls += 1
            if calls == 4:
                logits[1] = value
            return logits

        model.compute_logits = compute_logits  # type: ignore[method-assign]
        good, bad, sampled = llm.generate(
            [GOOD, [9, 9], GOOD],
            [greedy(30), greedy(30), SamplingParams(seed=1, max_tokens=30, ignore_eos=True)],
        )
        assert tokens_of(good) == tokens_of(alone)
        assert len(tokens_of(sampled)) == 30
        assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) == 3
        assert bad.error is not None and "no token can be chosen" in bad.error
        with pytest.raises(AssertionError, match=causes[value]):
            raise AssertionError(bad.error)
        assert_empty(llm)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_mostly_masked_logits_choose_among_the_rest(small_model: Path, temperature: float) -> None:
    with make_small_llm(small_model) as llm:
        model = llm.engine.core.runner.model
        compute = model.compute_logits

        def compute_logits(rows: torch.Tensor) -> torch.Tensor:
            logits = torch.full_like(compute(rows), -math.inf)
            logits[:, [7, 300]] = 0.0
            return logits

        model.compute_logits = compute_logits  # type: ignore[method-assign]
        params = SamplingParams(
            temperature=temperature, max_tokens=60, logprobs=5, top_p=0.99, seed=1
        )
        (output,) = llm.generate([GOOD], params)
        assert set(tokens_of(output)) == ({7} if temperature == 0.0 else {7, 300})
        for entry in output.outputs[0].logprobs or ():
            assert all(math.isfinite(e.logprob) for e in entry.values()), "no -inf in JSON"


# ---------------------------------------------------------------------- anything at all


def test_messages_show_any_value() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    assert shown("x") == "'x'" and shown(1.5) == "1.5"
    assert shown(Hostile()) == "<Hostile>" and shown(10**5000) == "<int>"
    assert len(shown("x" * 10**6)) < 300


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 400),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(
        [10**400, 10**5000, 1j, np.int64(3), np.float32("nan"), np.array([1, 2]), object(), int]
    ),
    st.sampled_from([np.str_("a"), np.str_("on"), np.float64(0.5), signal.SIGINT, "[0-9]", "true"]),
)
_GARBAGE = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=4),
    st.tuples(_SCALARS),
    st.dictionaries(st.one_of(st.integers(-2, 400), st.text(max_size=3)), _SCALARS, max_size=3),
)
_NAMES = [field.name for field in dataclasses.fields(SamplingParams)]
_FORM_NAMES = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
_ENGINE_NAMES = [field.name for field in dataclasses.fields(EngineConfig)]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(options=st.dictionaries(st.sampled_from(_NAMES), _GARBAGE, min_size=1, max_size=3))
def test_any_sampling_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    for make in (lambda: SamplingParams(**options), lambda: SamplingParams.from_dict(options)):
        try:
            params = make()
        except RequestError as error:
            assert any(name in str(error) for name in options), error
        else:
            hash(params.stop), params.stop_token_id_set, params.greedy
            assert_arrives(EngineRequest("a", ["a#0"], [1], params, max_tokens=1))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(options=st.dictionaries(st.sampled_from(_FORM_NAMES), _GARBAGE, min_size=1, max_size=3))
@example(options={"json_object": True, "disable_any_whitespace": None})
@example(options={"json_object": 1})
@example(options={"regex": np.str_("a")})
def test_any_form_is_taken_or_refused(options: dict[str, Any]) -> None:
    try:
        params = SamplingParams(structured_outputs=options)  # type: ignore[arg-type]
    except RequestError as error:
        assert "structured_outputs" in str(error)
    else:
        assert_arrives(EngineRequest("a", ["a#0"], [1], params, max_tokens=1))


def assert_arrives(request: EngineRequest) -> None:
    """What is taken here must not be what the engine process cannot read: it would stop."""
    assert decode_to_engine(encode(Submit(request))) == Submit(request)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(options=st.dictionaries(st.sampled_from(_ENGINE_NAMES), _GARBAGE, min_size=1, max_size=3))
def test_any_engine_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    try:
        config = EngineConfig.from_options(options)
    except ConfigError as error:
        assert str(error)
    else:
        start = decode_to_engine(encode(Start(config, None, "text", 0.1)))
        assert isinstance(start, Start) and start.config == config


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    prompt=st.one_of(_GARBAGE, st.lists(st.integers(0, 330), max_size=5)),
    options=st.dictionaries(st.sampled_from(_NAMES), _GARBAGE, max_size=2),
    others=st.dictionaries(st.sampled_from(["request_id", "priority", "cache_salt"]), _GARBAGE),
)
def test_any_submission_is_answered_or_refused(
    bystander: Bystander, prompt: Any, options: dict[str, Any], others: dict[str, Any]
) -> None:
    engine = bystander.llm.engine
    try:
        params = SamplingParams(**{"max_tokens": 3, "n": 1, **options})
        if params.n > 20:
            params = dataclasses.replace(params, n=20)
        request, _ = engine.inputs.process(prompt, params, **{"request_id": None, **others})
        assert_arrives(request)
        name = engine.add_request(prompt, params, **others)
    except ZipageError:
        pass
    else:
        assert engine.live_requests == {name}
        for _ in range(1500):
            if not engine.has_unfinished:
                break
            engine.step()
    assert_empty(bystander.llm)


def test_devices_beyond_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes cuda:256 for cuda:0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda") == resolve_device("cuda:1") == torch.device("cuda", 1)
    for name in ("cuda:2", "cuda:256", "cuda:300", "cuda:12345678901234567890"):
        with pytest.raises(ConfigError, match=f"{name}.*2 devices"):
            resolve_device(name)
