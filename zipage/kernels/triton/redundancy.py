"""Redundancy of keys, inside blocks (lightning) or over the whole cache (raw), and value norms.

The torch reference is `zipage.compression.scores.redundancy`. Similarities are symmetric, so the
sum of a row of S is that of its column: `similarity_columns` reads the keys once per column tile
and writes, for each column, its sum and the newest row above the threshold with its value;
`spared_means` subtracts those values from their rows' sums. No atomics, so results are bitwise
reproducible.

A scope is the set of keys that a key is compared with: its block, or the whole cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zipage.kernels.triton.fp8 import from_fp8
from zipage.kernels.triton.paging import products, text_positions, token_rows

_VARYING = (
    "num_blocks", "length", "num_scored", "first_position", "scope", "tiles_per_scope",
)  # fmt: skip


@triton.jit
def _load_tokens(
    kv,
    table,
    slot,
    there,
    layer,
    head,
    which,
    num_blocks,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    d = tl.arange(0, DIM_PAD)
    at = token_rows(table, slot, there, layer, head, which, num_blocks, KV_HEADS, BLOCK, DIM)
    mask = there[:, None] & (d[None, :] < DIM)
    tokens = tl.load(kv + at[:, None] + d[None, :], mask=mask, other=0.0)
    return from_fp8(tokens, False) if QUANTISED else tokens


@triton.jit
def _norms(tokens):
    wide = tokens.to(tl.float32)
    return tl.sqrt(tl.sum(wide * wide, 1))


@triton.jit(do_not_specialize=_VARYING)
def similarity_columns(
    kv,
    positions,
    table,
    sums,
    newest,
    values,
    num_blocks,
    length,
    num_scored,
    first_position,
    scope,
    tiles_per_scope,
    threshold,
    NORM_EPS: tl.constexpr,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum of each column of S without its diagonal, and its newest row above the threshold.

    Similarities compare directions, so keys are read without their scale.

    Grid ``(scopes * tiles_per_scope, L * H)``. Writes, all ``[L, H, T]``: sums, text positions of
    the newest rows (-1: none), and their similarities (0 if none).
    """
    layer = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    begin = tl.program_id(0) // tiles_per_scope * scope
    end = tl.minimum(begin + scope, length)
    column = begin + tl.program_id(0) % tiles_per_scope * COLUMNS + tl.arange(0, COLUMNS)
    there = column < end
    keys = _load_tokens(
        kv, table, column, there, layer, head, 0, num_blocks, QUANTISED, KV_HEADS, BLOCK, DIM,
        DIM_PAD,
    )  # fmt: skip
    inverse = 1.0 / tl.maximum(_norms(keys), NORM_EPS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    age = tl.full([COLUMNS, ROWS], -1, tl.int32)
    value = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        row_there = row < end
        others = _load_tokens(
            kv, table, row, row_there, layer, head, 0, num_blocks, QUANTISED, KV_HEADS, BLOCK,
            DIM, DIM_PAD,
        )  # fmt: skip
        position = text_positions(
            positions, table, row, row_there, layer, head, num_blocks, num_scored, first_position,
            KV_HEADS, BLOCK,
        )  # fmt: skip
        row_inverse = 1.0 / tl.maximum(_norms(others), NORM_EPS)
        similar = products(keys, others)
        similar = similar * inverse[:, None] * row_inverse[None, :]
        similar = tl.where(column[:, None] == row[None, :], 0.0, similar)
        total += similar
        newer = (similar > threshold) & (position[None, :] > age)
        age = tl.where(newer, position[None, :], age)
        value = tl.where(newer, similar, value)
    oldest = tl.max(age, 1)
    at = tl.program_id(1).to(tl.int64) * length + column
    tl.store(sums + at, tl.sum(total, 1), mask=there)
    tl.store(newest + at, oldest, mask=there)
    tl.store(values + at, tl.sum(tl.where(age == oldest[:, None], value, 0.0), 1), mask=there)


@triton.jit(do_not_specialize=_VARYING)
def spared_means(
    positions,
    table,
    sums,
    newest,
    values,
    out,
    num_blocks,
    length,
    num_scored,
    first_position,
    scope,
    tiles_per_scope,
    inverse_tau,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Row means of S over tau, without the entries that columns spare: ``[L, H, T]``.

    Grid ``(scopes * tiles_per_scope, L * H)``.
    """
    layer = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    begin = tl.program_id(0) // tiles_per_scope * scope
    end = tl.minimum(begin + scope, length)
    row = begin + tl.program_id(0) % tiles_per_scope * TILE + tl.arange(0, TILE)
    there = row < end
    position = text_positions(
        positions, table, row, there, layer, head, num_blocks, num_scored, first_position,
        KV_HEADS, BLOCK,
    )  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * length
    spared = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        chosen = tl.load(newest + base + column, mask=inside, other=-1)
        value = tl.load(values + base + column, mask=inside, other=0.0)
        spared += tl.where(chosen[None, :] == position[:, None], value[None, :], 0.0)
    total = tl.load(sums + base + row, mask=there, other=0.0) - tl.sum(spared, 1)
    tl.store(out + base + row, total / (end - begin) * inverse_tau, mask=there)


@triton.jit(do_not_specialize=("num_blocks", "length"))
def value_norms(
    kv,
    kv_scales,
    table,
    out,
    num_blocks,
    length,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Euclidean norms of the values: ``[L, H, T]``. Grid ``(tiles, L * H)``."""
    layer = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = slot < length
    values = _load_tokens(
        kv, table, slot, there, layer, head, 1, num_blocks, QUANTISED, KV_HEADS, BLOCK, DIM,
        DIM_PAD,
    )  # fmt: skip
    at = tl.program_id(1).to(tl.int64) * length + slot
    norms = _norms(values)
    if QUANTISED:
        norms *= tl.load(kv_scales + (layer * 2 + 1) * KV_HEADS + head)
    tl.store(out + at, norms, mask=there)
