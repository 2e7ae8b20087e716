"""What SamplingParams accepts, refuses and says."""

import dataclasses
import math

import numpy as np
import pytest

from zipage.errors import RequestError
from zipage.sampling_params import SamplingParams

ILLEGAL = [
    ("n", 0),
    ("n", -1),
    ("n", 1025),
    ("n", 10**9),
    ("n", 1.0),
    ("n", True),
    ("n", "2"),
    ("n", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -math.inf),
    ("temperature", 1e5),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("top_p", False),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-9),
    ("repetition_penalty", 1e9),
    ("repetition_penalty", math.nan),
    ("presence_penalty", 2.01),
    ("presence_penalty", -2.01),
    ("presence_penalty", math.inf),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", math.nan),
    ("logit_bias", {0: math.nan}),
    ("logit_bias", {0: 101}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"0": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", [1, 2]),
    ("seed", 1.5),
    ("seed", True),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", 5),
    ("stop", b"a"),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 16.0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 1.0),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 2.0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("prompt_logprobs", "1"),
    ("kv_budget", 0),
    ("kv_budget", 512.0),
    ("kv_budget", True),
    ("compression", "yes"),
    ("compression", True),
]

LEGAL = [
    ("n", 1024),
    ("temperature", 0),
    ("temperature", 1e-12),
    ("temperature", 1e4),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 10**6),
    ("min_p", 0),
    ("min_p", 1),
    ("repetition_penalty", 1.3),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("logit_bias", {}),
    ("logit_bias", {5: -100, 6: 100.0}),
    ("seed", 0),
    ("seed", -5),
    ("seed", 2**63 - 1),
    ("stop", None),
    ("stop", []),
    ("stop", ["a", "b"]),
    ("stop_token_ids", []),
    ("stop_token_ids", (1, 2)),
    ("max_tokens", None),
    ("max_tokens", 1),
    ("min_tokens", 5),
    ("logprobs", 0),
    ("logprobs", None),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("prompt_logprobs", None),
    ("kv_budget", 512),
    ("compression", "on"),
    ("compression", "off"),
]


@pytest.mark.parametrize(("name", "value"), ILLEGAL)
def test_illegal_values_are_refused_by_name_and_value(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "must be" in message
    shown = value
    if isinstance(value, dict):
        shown = next(iter(value.values())) if name == "logit_bias" else value
        keys = [repr(key) for key in value]
        assert repr(shown) in message or any(key in message for key in keys)
    elif isinstance(value, list):
        assert any(repr(item) in message for item in value)
    else:
        assert repr(value) in message


@pytest.mark.parametrize(("name", "value"), LEGAL)
def test_legal_values_are_accepted(name, value):
    SamplingParams(**{name: value}).verify(vocab_size=100)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    )
    assert params.seed is None and params.max_tokens is None and params.min_tokens == 0
    assert params.skip_special_tokens and not params.ignore_eos
    assert params.stop_strings == () and params.stop_token_id_set == frozenset()


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match=r"min_tokens=5 .* max_tokens, which is 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    SamplingParams(max_tokens=5, min_tokens=5)


def test_full_cache_has_no_budget():
    with pytest.raises(RequestError, match="kv_budget=512"):
        SamplingParams(compression="off", kv_budget=512)


def test_normal_forms():
    params = SamplingParams(
        top_k=-1,
        seed=-1,
        stop="x",
        stop_token_ids=[3, 3],
        temperature=np.float32(0.5),
        n=np.int64(2),
    )
    assert params.top_k == 0
    assert params.seed is None
    assert params.stop_strings == ("x",)
    assert params.stop_token_id_set == {3}
    assert type(params.temperature) is float and type(params.n) is int
    assert SamplingParams(stop=["b", "a", "b"]).stop_strings == ("b", "a")


def test_caller_mutations_do_not_reach_the_parameters():
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1] = math.nan
    stop.append("")
    assert params.logit_bias == {1: 2.0}
    assert params.stop_strings == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 0
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)
    assert dataclasses.replace(params, n=2) == SamplingParams(n=2, logit_bias={1: 2.0}, stop="a")


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy


def test_other_temperatures_are_not_greedy():
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().greedy


def test_verify_names_ids_outside_the_vocabulary():
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[99], logprobs=100).verify(100)
    with pytest.raises(RequestError, match=r"logit_bias=100 .* 0 to 99"):
        SamplingParams(logit_bias={100: 1.0}).verify(100)
    with pytest.raises(RequestError, match=r"stop_token_ids=100 .* 0 to 99"):
        SamplingParams(stop_token_ids=[1, 100]).verify(100)
    with pytest.raises(RequestError, match=r"logprobs=101 .* 100"):
        SamplingParams(logprobs=101).verify(100)
    with pytest.raises(RequestError, match=r"prompt_logprobs=11 .* 10"):
        SamplingParams(prompt_logprobs=11).verify(10)


def test_from_dict():
    params = SamplingParams.from_dict(
        {"temperature": 0.5, "stop": ["a"], "logit_bias": {"7": 1, "8": 2.5}}
    )
    assert params == SamplingParams(temperature=0.5, stop=["a"], logit_bias={7: 1.0, 8: 2.5})
    assert SamplingParams.from_dict({}) == SamplingParams()


def test_from_dict_names_unknown_options_and_near_matches():
    with pytest.raises(RequestError, match=r"'max_token'; did you mean max_tokens"):
        SamplingParams.from_dict({"max_token": 5})
    with pytest.raises(RequestError, match=r"'zzz'; known: .*temperature"):
        SamplingParams.from_dict({"zzz": 5})
    with pytest.raises(RequestError, match="logit_bias='x'"):
        SamplingParams.from_dict({"logit_bias": {"x": 5}})
    with pytest.raises(TypeError):
        SamplingParams(zzz=5)


@pytest.mark.parametrize("options", [None, 3, [("n", 1)]])
def test_from_dict_wants_a_mapping(options):
    with pytest.raises(RequestError, match="sampling options must be a mapping"):
        SamplingParams.from_dict(options)


def test_from_dict_refuses_endless_token_ids():
    with pytest.raises(RequestError, match="logit_bias='9999"):
        SamplingParams.from_dict({"logit_bias": {"9" * 5000: 1}})
