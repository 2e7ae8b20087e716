"""Selection: exact, with deterministic ties."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression import naive
from tests.compression.cached_request import (
    HAS_COMPILER,
    kept_positions,
    make_cache,
    make_job,
    positions_before,
)
from zipage.compression.native import NativeKernels
from zipage.compression.select import select_tokens

# By bits, for a thread that flushes denormals cannot even convert 2**-149 to fp32.
VALUES = {
    0x00000000: 0.0,
    0x80000000: -0.0,
    0x3F800000: 1.0,
    0x3F800001: 1.0 + 2**-23,
    0xBF800000: -1.0,
    0x00000001: 2**-149,
    0x80000001: -(2**-149),
    0x7F7FFFFF: 3.4028234e38,
    0x7F800000: math.inf,
    0xFF800000: -math.inf,
    0x7FC00000: math.nan,
    0xFFC00001: math.nan,
}


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@settings(max_examples=300, deadline=None)
@given(bits=st.lists(st.sampled_from(list(VALUES)), min_size=9, max_size=24), data=st.data())
def test_matches_sorting(bits: list[int], data: st.DataObject) -> None:
    length = len(bits)
    window = data.draw(st.integers(1, 4))
    keep = data.draw(st.integers(window, length - 1))
    protect = data.draw(st.integers(0, 6))
    positions = data.draw(st.permutations(range(length)))
    kept = select_tokens(
        from_bits(bits).view(1, 1, -1),
        torch.tensor(positions, dtype=torch.int32).view(1, 1, -1),
        keep,
        window,
        protect,
    )
    assert kept[0, 0].nonzero().flatten().tolist() == naive.select(
        [VALUES[x] for x in bits], list(positions), keep, window, protect
    )


def test_input_is_not_changed() -> None:
    scores = torch.rand(1, 2, 9)
    before = scores.clone()
    select_tokens(scores, torch.arange(9).expand(1, 2, 9), 5, 2, 1)
    assert torch.equal(scores, before)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), distinct=st.booleans(), protect=st.integers(0, 30))
def test_native_selects_the_same(seed: int, distinct: bool, protect: int) -> None:
    """Few distinct scores, or many; infinities, NaN and signed zeros among them."""
    draw = random.Random(seed)
    b, window = draw.choice([4, 8, 16]), draw.randint(1, 4)
    length = draw.randint(2 * b, 6 * b)
    cache = make_cache(block_size=b, window=window, dim=8, blocks=8)
    job = make_job(
        cache,
        length=length,
        num_targets=draw.randint(1, (length - 1) // b),
        num_scored=draw.randint(0, length),
        num_tokens=length + 20,
        seed=seed,
    )
    scores = from_bits([draw.choice(list(VALUES)) for _ in range(4 * length)])
    if distinct:
        normal = torch.tensor([draw.gauss(0, 1) for _ in range(4 * length)])
        special = torch.tensor([draw.random() < 0.2 for _ in range(4 * length)])
        scores = torch.where(special, scores, normal)
    scores = scores.view(2, 2, length)
    positions = positions_before(cache, job)
    kept = select_tokens(scores, positions, job.keep, window, protect)
    expected = positions[kept].view(2, 2, job.keep).sort(-1).values
    NativeKernels(cache).select_and_compact(job, scores, None, window, protect, False)
    assert torch.equal(kept_positions(cache, job), expected)
