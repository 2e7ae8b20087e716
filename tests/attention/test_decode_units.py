"""How the work of a decode step is cut."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.paged import Geometry, Paged
from zipage.kernels.triton import prefill_attention
from zipage.kernels.triton.decode_attention import DecodeAttention
from zipage.kernels.triton.prefill_attention import PrefillAttention


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_tiles_fit_the_shared_memory(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of compute capability 8.9, 8.0 and 9.0; where there is enough all have the same."""
    cache, tiles = Paged(Geometry(8, 2, dim), dtype=dtype).cache, []
    for memory in (101376, 166912, 232448):
        monkeypatch.setattr(prefill_attention, "shared_memory", lambda device, size=memory: size)
        attention = PrefillAttention(cache, 1.0)
        rows, tile = attention._rows, attention._tile
        # Queries, keys, values and weights of one step, as compiled for two stages below 9.0.
        size = (rows * dim + 2 * tile * dim + rows * tile) * dtype.itemsize
        assert rows >= 16 and tile >= 16 and size <= memory
        tiles.append((rows, tile))
    assert tiles[-1] == tiles[-2] == ((32, 32) if dtype == torch.float32 else (128, 64))
    assert tiles[0] == tiles[1] or dim == 256
