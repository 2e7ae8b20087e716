"""Draws of the sampler, exact probabilities written out for one row, and chi-square."""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from zipage.execution.sampler import Sampler, SamplingState
from zipage.sampling_params import SamplingParams


def exact(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> list[float]:
    """Probabilities of the next token, in double precision and one token after another."""
    edited = list(logits)
    if len(output) < params.min_tokens:
        for token_id in {*eos, *params.stop_token_ids}:
            edited[token_id] = -math.inf
    for token_id, amount in (params.logit_bias or {}).items():
        edited[token_id] += amount
    for token_id in {*prompt, *output}:
        x, times = edited[token_id], list(output).count(token_id)
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        edited[token_id] = x - params.frequency_penalty * times
        edited[token_id] -= params.presence_penalty * (times > 0)
    scaled = [x / params.temperature for x in edited]
    peak = max(scaled)
    mass = {i: math.exp(x - peak) for i, x in enumerate(scaled)}
    mass = {i: m for i, m in mass.items() if m >= params.min_p}
    if params.top_k:
        kth = sorted(mass.values(), reverse=True)[: params.top_k][-1]
        mass = {i: m for i, m in mass.items() if m >= kth}
    if params.top_p < 1:
        total, before, least = sum(mass.values()), 0.0, 0.0
        for m in sorted(mass.values(), reverse=True):
            if before >= params.top_p * total:
                break
            before, least = before + m, m
        mass = {i: m for i, m in mass.items() if m >= least}
    total = sum(mass.values())
    return [mass.get(i, 0.0) / total for i in range(len(logits))]


def count_draws(
    logits: Sequence[float], states: Sequence[SamplingState], draws: int, seed: int = 5
) -> list[int]:
    """How often each token was drawn: all states draw once in every call of the sampler."""
    batch = torch.tensor(logits).expand(len(states), -1)
    sampler = Sampler(seed)
    counts: Counter[int] = Counter()
    while counts.total() < draws:
        output = sampler.sample(batch, states)
        assert not output.errors
        counts.update(output.token_ids)
    return [counts[i] for i in range(len(logits))]


def chi_square_z(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Chi-square as a normal deviate (Wilson and Hilferty); rare tokens are pooled.

    Infinite if a token of probability zero was drawn.
    """
    draws = sum(counts)
    statistic, cells, rare_count, rare_mean = 0.0, 0, 0, 0.0
    for count, p in zip(counts, probabilities, strict=True):
        if p == 0:
            if count:
                return math.inf
        elif draws * p < 10:
            rare_count, rare_mean = rare_count + count, rare_mean + draws * p
        else:
            statistic += (count - draws * p) ** 2 / (draws * p)
            cells += 1
    if rare_mean > 1:
        statistic += (rare_count - rare_mean) ** 2 / rare_mean
        cells += 1
    freedom = max(cells - 1, 1)
    ratio = (statistic / freedom) ** (1 / 3)
    return (ratio - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
