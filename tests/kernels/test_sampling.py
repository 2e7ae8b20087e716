"""The sampling kernels against their torch references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.devices import SANITIZED
from zipage.execution import categorical, penalties
from zipage.kernels.triton import sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 3
CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_p": 0.9},
    {"top_p": 1.0 - 1e-9},
    {"top_k": 400},
    {"min_p": 0.1},
    {"min_p": 1e-6, "top_p": 0.7},
    {"min_p": 0.01, "top_k": 10, "top_p": 0.8},
]


def numbers(vocab_size: int, cut: dict[str, Any], uniforms: torch.Tensor) -> torch.Tensor:
    """A draw for each row; rows are drawn into places of the other end."""
    count = len(uniforms)
    min_p = cut.get("min_p", 0.0)
    rest = [
        1.0 / cut.get("temperature", 1.0),
        0.0,
        math.log(min_p) if min_p else -math.inf,
        min(cut.get("top_k", vocab_size), vocab_size),
        cut.get("top_p", 1.0),
    ]
    table = torch.tensor([[i, count - 1 - i, *rest] for i in range(count)], dtype=torch.float64)
    table[:, 3] = uniforms
    return table


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 700])
@pytest.mark.parametrize("spread", [0.2, 4.0])
def test_draws_equal_the_reference(
    vocab_size: int, spread: float, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat rows have more candidates than a tile holds, and nuclei beyond the first guess."""
    monkeypatch.setattr(sampling, "_TILE", 256)
    monkeypatch.setattr(sampling, "_NUCLEUS_BLOCKS", 4)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(ROWS, vocab_size, generator=generator) * spread
    logits[1] = (logits[1] * 2).round() / 2  # ties
    logits[2, ::7] = -torch.inf
    uniforms = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    table = numbers(vocab_size, cut, uniforms)
    peaks = logits.amax(-1).flip(0)
    expected, drawn = torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), -1)
    categorical.draw_rows(logits, peaks, table, expected)
    drawn = drawn.to(DEVICE)
    sampling.draw_rows(logits.to(DEVICE), peaks.to(DEVICE), table.to(DEVICE), drawn)
    assert drawn.tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary(cut: dict[str, Any], dtype: torch.dtype) -> None:
    """Numbers that fall on the border of two tokens may be rounded to either side."""
    rows, vocab_size = 12 if SANITIZED else 200, 151_936
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(rows, 1, generator=generator) * 5
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)
    table = numbers(vocab_size, cut, torch.rand(rows, dtype=torch.float64, generator=generator))
    peaks, expected = logits.amax(-1).flip(0), torch.zeros(rows, dtype=torch.int64)
    categorical.draw_rows(logits, peaks, table, expected)
    drawn = torch.full((rows,), -1, device=DEVICE)
    sampling.draw_rows(logits.to(DEVICE), peaks.to(DEVICE), table.to(DEVICE), drawn)
    different = int((drawn.cpu() != expected).sum())
    print(f"{different} of {rows} draws differ")
    assert different <= max(1, rows // 50)


def test_unusable_rows_are_left_alone() -> None:
    logits = torch.zeros(4, 300)
    logits[0], logits[1, 5], logits[2, 9] = -torch.inf, torch.inf, torch.nan
    table = numbers(300, {"top_p": 0.5}, torch.full((4,), 0.5, dtype=torch.float64))
    peaks, drawn = logits.amax(-1).flip(0), torch.full((4,), -1)
    for draw_rows in (categorical.draw_rows, sampling.draw_rows):
        out = drawn.clone().to(DEVICE)
        draw_rows(logits.to(DEVICE), peaks.to(DEVICE), table.to(DEVICE), out)
        assert out.tolist() == [150, 0, 0, 0]


def test_penalties_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator)
    logits[1, ::3] = -torch.inf
    counts = torch.randint(-9, 9, (4, 5000), generator=generator, dtype=torch.int32).clamp(min=0)
    table = torch.tensor([[2, 0, 1.3, 0.5, -0.25], [1, 3, 0.7, -0.1, 1.0]], dtype=torch.float64)
    expected, given = logits.clone(), logits.clone().to(DEVICE)
    penalties.penalise(expected, counts, table)
    sampling.penalise(given, counts.to(DEVICE), table.to(DEVICE))
    torch.testing.assert_close(given.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(given[0].cpu(), logits[0]) and not torch.equal(expected[2], logits[2])
