"""How the work of a decode step is cut."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.paged import Geometry, Paged
from zipage.kernels.triton.decode_attention import DecodeAttention


@given(
    lens=st.lists(st.integers(1, 20000), min_size=1, max_size=40),
    skipped=st.sets(st.integers(0, 39)),
    programs=st.sampled_from([1, 7, 264]),
)
@settings(max_examples=200, deadline=None)
def test_units_cover_every_cache_once(lens: list[int], skipped: set[int], programs: int) -> None:
    attention = DecodeAttention(Paged(Geometry(8, 2, 16)).cache, 1.0, max_sequences=40)
    attention.set_programs(programs)
    decoding = np.array([i not in skipped for i in range(len(lens))])
    if not decoding.any():
        return
    rows = np.arange(len(lens)) * 3
    units, starts = attention.plan(np.array(lens), rows, decoding)
    assert len(units) == starts[-1] <= attention.max_units
    for seq, length in enumerate(lens):
        own = units[starts[seq] : starts[seq + 1]]
        if not decoding[seq]:
            assert len(own) == 0
            continue
        assert (own[:, 0] == seq).all() and (own[:, 1] == rows[seq]).all()
        assert own[0, 2] == 0 and own[-1, 3] == length
        assert (own[1:, 2] == own[:-1, 3]).all() and (own[:, 3] > own[:, 2]).all()


def test_equal_caches_fill_the_programs() -> None:
    """16 caches of 8 heads on 264 programs: two units each, one wave, instead of several."""
    attention = DecodeAttention(Paged(Geometry(32, 8, 16)).cache, 1.0, max_sequences=40)
    attention.set_programs(264)
    units, _ = attention.plan(np.full(16, 8192), np.arange(16), np.ones(16, dtype=bool))
    assert len(units) == 32
