"""Draws at the edges of the cumulative distribution, where rounding decides."""

import math

import pytest
import torch

from zipage.execution.categorical import draw, draw_filtered

ROWS = 150
ALMOST_ONE = 1.0 - 2.0**-53


def masked_logits(vocab_size, seed):
    """Random logits whose block-border tokens, and for even seeds the last, are impossible."""
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(seed)) * 8
    borders = [i for i in range(vocab_size) if i % 256 in (0, 255)]
    logits[:, borders] = -torch.inf
    logits[:, -1] = -torch.inf if seed % 2 == 0 else 0.0
    return logits


def whole(logits, uniforms):
    return draw(logits, logits.amax(-1), torch.ones(len(logits)), uniforms)


def filtered(logits, uniforms, min_p=0.0, top_k=10**9, top_p=1.0):
    rows = len(logits)
    return draw_filtered(
        logits,
        logits.amax(-1),
        torch.ones(rows),
        uniforms,
        torch.full((rows,), math.log(min_p) if min_p else -math.inf),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
    )


@pytest.mark.parametrize("vocab_size", [3, 200, 256, 258, 300, 1030])
def test_impossible_tokens_are_never_drawn(vocab_size):
    for seed in range(2):
        logits = masked_logits(vocab_size, seed)
        mass = (logits - logits.amax(-1, keepdim=True)).exp().double().cumsum(-1)
        # The ends of blocks and of the whole, from both sides, besides 0 and almost 1.
        marks = [mass[:, i] / mass[:, -1] for i in range(255, vocab_size - 1, 256)]
        marks += [torch.zeros(ROWS, dtype=torch.float64)]
        marks += [torch.full((ROWS,), ALMOST_ONE, dtype=torch.float64)]
        for mark in marks:
            for shift in (-(2.0**-53), 0.0, 2.0**-53):
                uniforms = (mark + shift).clamp(0.0, ALMOST_ONE)
                for token_ids in (
                    whole(logits, uniforms),
                    filtered(logits, uniforms, top_p=0.999),
                    filtered(logits, uniforms, min_p=1e-3),
                ):
                    assert token_ids.min() >= 0 and token_ids.max() < vocab_size
                    assert logits.gather(1, token_ids.unsqueeze(1)).isfinite().all()


def test_extreme_numbers_pick_the_first_and_the_last_token_of_the_set():
    logits = torch.tensor([-torch.inf, 1.0, 3.0, 2.0, 0.0, -torch.inf]).expand(2, -1)
    uniforms = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    assert whole(logits, uniforms).tolist() == [1, 4]
    assert filtered(logits, uniforms, top_k=2).tolist() == [2, 3]
    assert filtered(logits, uniforms, top_k=1).tolist() == [2, 2]
    assert filtered(logits, uniforms, min_p=0.1).tolist() == [1, 3]
    assert filtered(logits, uniforms, top_p=1e-300).tolist() == [2, 2]
    assert filtered(logits, uniforms, top_p=ALMOST_ONE).tolist() == [1, 4]


def test_a_number_picks_the_same_token_from_the_whole_and_from_an_idle_filter():
    logits = torch.randn(ROWS, 700, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = whole(logits, uniforms)
    assert torch.equal(filtered(logits, uniforms, min_p=1e-30), expected)
    assert torch.equal(filtered(logits, uniforms, top_p=ALMOST_ONE), expected)
    mass = logits.double().softmax(-1).cumsum(-1)
    assert torch.equal(torch.searchsorted(mass, uniforms.unsqueeze(1)).squeeze(1), expected)


@pytest.mark.parametrize("possible", [1, 4, 70])
@pytest.mark.parametrize("vocab_size", [71, 300, 5000])
def test_top_k_of_more_tokens_than_are_possible_is_idle(vocab_size, possible):
    """As where the form of an answer allows few tokens."""
    generator = torch.Generator().manual_seed(possible)
    logits = torch.full((ROWS, vocab_size), -torch.inf)
    logits[:, torch.randperm(vocab_size, generator=generator)[:possible]] = torch.randn(
        ROWS, possible, generator=generator
    )
    uniforms = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    for top_p in (0.5, 0.9, 1.0):
        expected = filtered(logits, uniforms, top_p=top_p)
        for top_k in (possible, possible + 1, vocab_size - 1):
            found = filtered(logits, uniforms, top_k=top_k, top_p=top_p)
            assert torch.equal(found, expected), (top_k, top_p)
