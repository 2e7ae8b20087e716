"""Attention the window's queries pay to each cached token.

The torch reference is `zipage.compression.scores.window_attention`. Softmax needs its sum before
rows can be compared, and w·G rows of T weights are too many to store, so the logits are computed
twice: `window_statistics` writes each row's maximum and sum per part of the cache, `window_scores`
computes the weights and reduces them over the query heads of the KV head and the window. All G
heads of a KV head share one read of its keys.

Rows are (query i, head g) pairs, g fastest, with G padded to a power of two. If there are more
than ROWS, they are split along the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zipage.kernels.triton.fp8 import from_fp8, query_operand
from zipage.kernels.triton.paging import products, token_rows

_VARYING = ("num_blocks", "num_slots", "query_slot", "length", "chunk", "num_parts")


@triton.jit
def _load_queries(
    queries,
    kv_scales,
    layer,
    head,
    row_chunk,
    num_slots,
    query_slot,
    scale,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``[ROWS, DIM_PAD]`` queries, zero for padding, and the factor of their logits."""
    row = tl.arange(0, ROWS)
    i = row_chunk * (ROWS // GROUP_PAD) + row // GROUP_PAD
    g = row % GROUP_PAD
    d = tl.arange(0, DIM_PAD)
    there = (i < WINDOW) & (g < GROUP)
    slot = (layer.to(tl.int64) * num_slots + query_slot) * WINDOW
    at = ((slot + i) * (KV_HEADS * GROUP) + head * GROUP + g) * DIM
    mask = there[:, None] & (d[None, :] < DIM)
    q = tl.load(queries + at[:, None] + d[None, :], mask=mask, other=0.0)
    if QUANTISED:
        q, factor = query_operand(q, queries.dtype.element_ty == tl.float32)
        factor = (factor * (scale * tl.load(kv_scales + layer * 2 * KV_HEADS + head)))[:, None]
    else:
        factor = scale
    return q, factor


@triton.jit
def _logits(
    q,
    kv,
    table,
    slot,
    last_visible,
    layer,
    head,
    num_blocks,
    length,
    factor,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """``[ROWS, TILE]`` logits in units of log2, -inf where a query does not see a token."""
    there = slot < length
    d = tl.arange(0, DIM_PAD)
    at = token_rows(table, slot, there, layer, head, 0, num_blocks, KV_HEADS, BLOCK, DIM)
    mask = there[:, None] & (d[None, :] < DIM)
    keys = tl.load(kv + at[:, None] + d[None, :], mask=mask, other=0.0)
    if QUANTISED:
        keys = from_fp8(keys, q.dtype == tl.float32)
    logits = products(q, keys) * factor
    return tl.where(slot[None, :] <= last_visible[:, None], logits, float("-inf"))


@triton.jit
def _finite_maximum(maximum):
    """0 for a row that has seen nothing yet, so that its weights are 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit(do_not_specialize=_VARYING)
def window_statistics(
    queries,
    kv,
    kv_scales,
    table,
    maxima,
    sums,
    num_blocks,
    num_slots,
    query_slot,
    length,
    chunk,
    num_parts,
    scale,
    QUANTISED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Maximum and sum of the weights of each row over one part of the cache.

    Grid ``(num_parts, ROW_CHUNKS, L * H)``; writes ``[L, H, num_parts, ROW_CHUNKS * ROWS]``.
    """
    part = tl.program_id(0)
    row_chunk = tl.program_id(1)
    layer = tl.program_id(2) // KV_HEADS
    head = tl.program_id(2) % KV_HEADS
    row = tl.arange(0, ROWS)
    i = row_chunk * (ROWS // GROUP_PAD) + row // GROUP_PAD
    last_visible = tl.minimum(length - WINDOW + i, length - 1)
    q, factor = _load_queries(
        queries, kv_scales, layer, head, row_chunk, num_slots, query_slot, scale, QUANTISED,
        KV_HEADS, GROUP, GROUP_PAD, WINDOW, DIM, DIM_PAD, ROWS,
    )  # fmt: skip
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first = part * chunk
    for start in range(first, tl.minimum(first + chunk, length), TILE):
        slot = start + tl.arange(0, TILE)
        logits = _logits(
            q, kv, table, slot, last_visible, layer, head, num_blocks, length, factor,
            QUANTISED, KV_HEADS, BLOCK, DIM, DIM_PAD,
        )  # fmt: skip
        new = tl.maximum(maximum, tl.max(logits, 1))
        base = _finite_maximum(new)
        weights = tl.exp2(logits - base[:, None])
        total = total * tl.exp2(maximum - base) + tl.sum(weights, 1)
        maximum = new
    at = tl.program_id(2) * num_parts + part
    at = (at * ROW_CHUNKS + row_chunk) * ROWS + row
    tl.store(maxima + at, maximum)
    tl.store(sums + at, total)


@triton.jit
def _load_statistics(
    maxima,
    sums,
    layer_head,
    row_chunk,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``[ROWS]`` maximum and inverse sum over the whole cache; the inverse is 0 for padding."""
    row = tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    at = (layer_head * num_parts + part[:, None]) * (ROW_CHUNKS * ROWS)
    at += row_chunk * ROWS + row[None, :]
    mask = (part[:, None] < num_parts) & (row[None, :] >= 0)
    peaks = tl.load(maxima + at, mask=mask, other=float("-inf"))
    partial = tl.load(sums + at, mask=mask, other=0.0)
    maximum = _finite_maximum(tl.max(peaks, 0))
    total = tl.sum(partial * tl.exp2(peaks - maximum[None, :]), 0)
    i = row_chunk * (ROWS // GROUP_PAD) + row // GROUP_PAD
    there = (i < WINDOW) & (row % GROUP_PAD < GROUP)
    return maximum, tl.where(there, 1.0 / total, 0.0)


@triton.jit
def _reduce_group(
    weights,
    GROUP_MAX: tl.constexpr,
    WINDOW_MAX: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Reduce ``[ROWS, TILE]`` weights to ``[TILE]``: over the heads, then over the queries."""
    if GROUP_MAX and WINDOW_MAX:
        reduced = tl.max(weights, 0)
    elif GROUP_MAX == WINDOW_MAX:
        reduced = tl.sum(weights, 0)
    else:
        rows = tl.reshape(weights, [ROWS // GROUP_PAD, GROUP_PAD, TILE])
        reduced = tl.sum(tl.max(rows, 1), 0) if GROUP_MAX else tl.max(tl.sum(rows, 1), 0)
    return reduced


@triton.jit(do_not_specialize=_VARYING)
def window_scores(
    queries,
    kv,
    kv_scales,
    table,
    maxima,
    sums,
    out,
    num_blocks,
    num_slots,
    query_slot,
    length,
    chunk,
    num_parts,
    scale,
    QUANTISED: tl.constexpr,
    GROUP_MAX: tl.constexpr,
    WINDOW_MAX: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weights of one part of the cache, reduced: ``[L, H, T]``. Grid ``(num_parts, 1, L * H)``."""
    part = tl.program_id(0)
    # From the last layer back, as `window_statistics` left its keys in the L2 cache.
    layer_head = tl.num_programs(2) - 1 - tl.program_id(2)
    layer = layer_head // KV_HEADS
    head = layer_head % KV_HEADS
    row = tl.arange(0, ROWS)
    factor = (1.0 if GROUP_MAX else 1.0 / GROUP) * (1.0 if WINDOW_MAX else 1.0 / WINDOW)
    # A row with any NaN is all NaN and so must be its reduction, but max ignores NaN.
    maximum, inverse = _load_statistics(
        maxima, sums, layer_head, 0, num_parts,
        GROUP, GROUP_PAD, WINDOW, ROWS, ROW_CHUNKS, PARTS,
    )  # fmt: skip
    poison = tl.sum(inverse * 0.0, 0)
    if ROW_CHUNKS == 1:
        q, logit_factor = _load_queries(
            queries, kv_scales, layer, head, 0, num_slots, query_slot, scale, QUANTISED,
            KV_HEADS, GROUP, GROUP_PAD, WINDOW, DIM, DIM_PAD, ROWS,
        )  # fmt: skip
    else:
        for row_chunk in range(1, ROW_CHUNKS):
            _, inverse = _load_statistics(
                maxima, sums, layer_head, row_chunk, num_parts,
                GROUP, GROUP_PAD, WINDOW, ROWS, ROW_CHUNKS, PARTS,
            )  # fmt: skip
            poison += tl.sum(inverse * 0.0, 0)
    first = part * chunk
    for start in range(first, tl.minimum(first + chunk, length), TILE):
        slot = start + tl.arange(0, TILE)
        score = tl.zeros([TILE], tl.float32)
        for row_chunk in range(ROW_CHUNKS):
            if ROW_CHUNKS > 1:
                q, logit_factor = _load_queries(
                    queries, kv_scales, layer, head, row_chunk, num_slots, query_slot, scale,
                    QUANTISED, KV_HEADS, GROUP, GROUP_PAD, WINDOW, DIM, DIM_PAD, ROWS,
                )  # fmt: skip
                maximum, inverse = _load_statistics(
                    maxima, sums, layer_head, row_chunk, num_parts,
                    GROUP, GROUP_PAD, WINDOW, ROWS, ROW_CHUNKS, PARTS,
                )  # fmt: skip
            i = row_chunk * (ROWS // GROUP_PAD) + row // GROUP_PAD
            last_visible = tl.minimum(length - WINDOW + i, length - 1)
            logits = _logits(
                q, kv, table, slot, last_visible, layer, head, num_blocks, length, logit_factor,
                QUANTISED, KV_HEADS, BLOCK, DIM, DIM_PAD,
            )  # fmt: skip
            weights = tl.exp2(logits - maximum[:, None]) * inverse[:, None]
            reduced = _reduce_group(weights, GROUP_MAX, WINDOW_MAX, GROUP_PAD, ROWS, TILE)
            score = tl.maximum(score, reduced) if WINDOW_MAX else score + reduced
        at = layer_head.to(tl.int64) * length + slot
        tl.store(out + at, score * factor + poison, mask=slot < length)
