"""10^5 draws against the exact distribution, for every filter and their combinations."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from tests.sampling.distributions import chi_square_z, count_draws, exact
from zipage.execution.sampler import SamplingState
from zipage.sampling_params import SamplingParams

V = 40
DRAWS = 100_000
ROWS = 10_000
ACCEPTED, REJECTED = 4.0, 8.0
LOGITS = [x * 1.5 for x in torch.randn(V, generator=torch.Generator().manual_seed(3)).tolist()]
BEST = np.argsort(LOGITS)[::-1].tolist()
EOS = (BEST[1],)
PROMPT = [BEST[0], BEST[4], BEST[4], BEST[30]]
OUTPUT = [BEST[1], BEST[2], BEST[2], BEST[2], BEST[7], BEST[35]]

DISTRIBUTIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "wider top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "cold top_k": {"temperature": 0.5, "top_k": 7},
    "hot top_p": {"temperature": 3.0, "top_p": 0.6},
    "cold min_p": {"temperature": 0.5, "min_p": 0.02},
    "top_k top_p": {"top_k": 7, "top_p": 0.85},
    "top_k min_p": {"top_k": 12, "min_p": 0.03},
    "top_p min_p": {"top_p": 0.9, "min_p": 0.03},
    "all filters": {"temperature": 1.4, "min_p": 0.05, "top_k": 20, "top_p": 0.9},
    "reasoning": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "repetition": {"repetition_penalty": 1.8},
    "rewarded repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "all penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
    },
    "bias": {"logit_bias": {BEST[0]: -3.0, BEST[20]: 4.0}},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": [BEST[0]]},
    "repetition top_p": {"repetition_penalty": 1.8, "top_p": 0.8},
    "frequency top_k": {"frequency_penalty": 0.7, "top_k": 7},
    "presence min_p": {"presence_penalty": 1.5, "min_p": 0.1},
    "bias cold": {"logit_bias": {BEST[0]: -3.0, BEST[20]: 4.0}, "temperature": 0.5},
    "min_tokens top_p": {"min_tokens": 10, "top_p": 0.5},
    "everything": {
        "min_tokens": 10,
        "logit_bias": {BEST[20]: 4.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "temperature": 1.3,
        "min_p": 0.02,
        "top_k": 15,
        "top_p": 0.95,
    },
}


def probabilities(name: str) -> list[float]:
    return exact(LOGITS, SamplingParams(**DISTRIBUTIONS[name]), PROMPT, OUTPUT, EOS)


def make_state(**options: object) -> SamplingState:
    return SamplingState(SamplingParams(**options), PROMPT, list(OUTPUT), EOS, V)


@cache
def drawn(name: str) -> list[int]:
    rows = [make_state(**DISTRIBUTIONS[name])] * ROWS
    if "min_tokens" in DISTRIBUTIONS[name]:
        # A state counts its draws, and the minimum length would be over after some of them.
        counts = [0] * V
        for batch in range(DRAWS // ROWS):
            rows = [make_state(**DISTRIBUTIONS[name])] * ROWS
            counts = np.add(counts, count_draws(LOGITS, rows, ROWS, seed=batch)).tolist()
        return counts
    return count_draws(LOGITS, rows, DRAWS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    assert sum(drawn(name)) == DRAWS
    assert chi_square_z(drawn(name), probabilities(name)) < ACCEPTED


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_of_any_other_distribution_are_rejected(name: str) -> None:
    """What a sampler that ignores or mixes up an option would draw does not pass."""
    for other in DISTRIBUTIONS:
        if other != name:
            assert chi_square_z(drawn(other), probabilities(name)) > REJECTED, other


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("cold", {"temperature": 0.52}),
        ("top_k", {"top_k": 8}),
        ("top_k", {"top_k": 6}),
        ("top_p", {"top_p": 0.75}),
        ("min_p", {"min_p": 0.12}),
        ("presence", {"presence_penalty": 1.2}),
        ("frequency", {"frequency_penalty": 0.6}),
        ("repetition", {"repetition_penalty": 1.6}),
        ("bias", {"logit_bias": {BEST[0]: -3.0, BEST[20]: 3.8}}),
    ],
)
def test_slightly_wrong_options_are_rejected(name: str, broken: dict[str, object]) -> None:
    counts = count_draws(LOGITS, [make_state(**broken)] * ROWS, DRAWS)
    assert chi_square_z(counts, probabilities(name)) > ACCEPTED + 1


@pytest.mark.parametrize("name", ["plain", "all filters"])
def test_seeded_draws_follow_the_same_distribution(name: str) -> None:
    """Over the draws of one seed, and over the first draws of many seeds."""
    stream = [make_state(seed=1, **DISTRIBUTIONS[name]) for _ in range(ROWS)]
    for number, state in enumerate(stream):
        state.num_sampled = number * 10  # each draws ten times
    seeds = [make_state(seed=7_000 + i, **DISTRIBUTIONS[name]) for i in range(ROWS)]
    for states in (stream, seeds):
        counts = count_draws(LOGITS, states, DRAWS)
        assert sum(counts) == DRAWS
        assert chi_square_z(counts, probabilities(name)) < ACCEPTED


def test_filters_renormalise_in_order() -> None:
    # min-p leaves {.5, .3}; top-p .6 of that mass needs .5 alone, of the whole it would need both.
    logits = [math.log(p) for p in (0.5, 0.3, 0.1, 0.06, 0.04)]
    state = SamplingState(SamplingParams(min_p=0.5, top_p=0.6), [], [], (), 5)
    assert count_draws(logits, [state] * 5000, 5000) == [5000, 0, 0, 0, 0]
