"""Causal attention of several new tokens of a sequence over its paged cache.

A program computes one tile of query rows: some consecutive new tokens times the query heads of one
KV head, so that each key and value is read once for all of them (FlashAttention-2,
arXiv 2307.08691, over pages).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from zipage.cache.kv_cache import KVCache
from zipage.kernels.triton.fp8 import from_fp8, query_operand
from zipage.kernels.triton.launch import shared_memory

# Queries take at most 1 / this of the shared memory, and the keys of a step 1 / the next: values
# need space too, perhaps for two steps.
_QUERIES_SHARE = 2
_KEYS_SHARE = 5


@triton.jit
def _attend_tile(
    query,
    kv,
    table,
    kv_head,
    first,
    limit,
    end,
    top,
    total,
    out,
    logit_scale,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One step of the online softmax over the slots ``[first, first + TILE)``."""
    dim = tl.arange(0, DIM_PADDED)
    time = tl.arange(0, TILE)
    slot = first + time
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        entry = ((block * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE) + time
    else:
        block = tl.load(table + slot // BLOCK_SIZE, mask=slot < end, other=0).to(tl.int64)
        entry = (block * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    pointer = kv + entry[:, None] * DIM + dim[None, :]
    if MASKED or DIM != DIM_PADDED:
        mask = (slot < end)[:, None] & (dim < DIM)[None, :]
        key = tl.load(pointer, mask=mask, other=0.0)
        value = tl.load(pointer + NUM_KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
    else:
        key = tl.load(pointer)
        value = tl.load(pointer + NUM_KV_HEADS * BLOCK_SIZE * DIM)
    if QUANTISED:
        key = from_fp8(key, query.dtype == tl.float32)
        value = from_fp8(value, query.dtype == tl.float32)
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * logit_scale
    if MASKED:
        logits = tl.where(slot[None, :] <= limit[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
    return new_top, total, out


# One compiled kernel for all steps: a graph's inputs may have any alignment in its buffer.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "cache_lens", "tiles"],
)
def _prefill_kernel(
    q,  # [rows, q_stride]
    kv,  # [N, 2, H, b, D] of the layer
    kv_scales,  # [2, H] of the layer
    tables,  # [S, table_stride]
    cache_lens,  # [S]
    tiles,  # [P, 4] sequence, its first row, first new token of the tile, number of new tokens
    attended,  # [rows, Q, D]
    scale_log2,
    q_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTISED: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    entry = tiles + tl.program_id(1) * 4
    kv_head = tl.program_id(0)
    seq = tl.load(entry)
    row = tl.load(entry + 1).to(tl.int64)
    first = tl.load(entry + 2)
    fresh = tl.load(entry + 3)
    cache_len = tl.load(cache_lens + seq)
    context = cache_len - fresh

    r = tl.arange(0, ROWS)
    token = first + r // GROUP
    head = kv_head * GROUP + r % GROUP
    dim = tl.arange(0, DIM_PADDED)
    mask = ((r < TOKENS * GROUP) & (token < fresh))[:, None] & (dim < DIM)[None, :]
    query = tl.load(
        q + (row + token)[:, None] * q_stride + head[:, None] * DIM + dim[None, :],
        mask=mask,
        other=0.0,
    )
    if QUANTISED:
        query, factor = query_operand(query, q.dtype.element_ty == tl.float32)
        logit_scale = (factor * (scale_log2 * tl.load(kv_scales + kv_head)))[:, None]
    else:
        logit_scale = scale_log2
    # Rows without a token see what the last token sees, so that their softmax stays finite.
    limit = context + tl.minimum(token, fresh - 1)
    end = tl.minimum(cache_len, context + first + TOKENS)
    unmasked = (context + first + 1) // TILE * TILE
    if INVARIANT:
        # Which slots need no mask for any row depends on the chunk, and code with and without a
        # mask may be compiled to different rounding.
        unmasked = 0
    table = tables + seq * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for start in range(0, unmasked, TILE):
        top, total, out = _attend_tile(
            query, kv, table, kv_head, start, limit, end, top, total, out, logit_scale,
            False, NUM_KV_HEADS, BLOCK_SIZE, DIM, DIM_PADDED, TILE, PRECISION, QUANTISED,
        )  # fmt: skip
    for start in range(unmasked, end, TILE):
        top, total, out = _attend_tile(
            query, kv, table, kv_head, start, limit, end, top, total, out, logit_scale,
            True, NUM_KV_HEADS, BLOCK_SIZE, DIM, DIM_PADDED, TILE, PRECISION, QUANTISED,
        )  # fmt: skip
    if QUANTISED:
        out *= tl.load(kv_scales + NUM_KV_HEADS + kv_head)
    pointer = attended + ((row + token)[:, None] * NUM_HEADS + head[:, None]) * DIM + dim[None, :]
    # Padding sequences of a graph have no cache.
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(pointer, (out / total[:, None]).to(attended.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class PrefillTiles:
    """``[P, 4]`` int32 on the device: sequence, its first row, first new token, new tokens."""

    tiles: torch.Tensor


class PrefillAttention:
    """The prefill kernel of one KV cache.

    Args:
        cache: the KV pool.
        scale: factor of the attention logits.
        batch_invariant: the result of a token is bitwise the same wherever it lies in a chunk.
    """

    def __init__(self, cache: KVCache, scale: float, batch_invariant: bool = False) -> None:
        spec = cache.spec
        self.cache = cache
        self._scale_log2 = scale * 1.4426950408889634
        group = spec.num_heads // spec.num_kv_heads
        small = spec.dtype == torch.float32
        self._invariant = batch_invariant
        # Then single tokens are tiles too, and use few of the rows.
        most = 64 if batch_invariant else 128
        self._dim_padded = max(16, triton.next_power_of_2(spec.head_dim))
        size, memory = self._dim_padded * spec.dtype.itemsize, shared_memory(spec.device)
        rows = 32 if small else most
        while rows > 16 and rows * size * _QUERIES_SHARE > memory:
            rows //= 2
        self._rows = max(rows, triton.next_power_of_2(group))
        self._tile = 32 if small else 64
        while self._tile > 16 and self._tile * size * _KEYS_SHARE > memory:
            self._tile //= 2
        #: New tokens per tile.
        self.tokens_per_tile = self._rows // group

    def plan(self, query_start: np.ndarray, prefilling: np.ndarray) -> np.ndarray:
        """Split the new tokens of the prefilling sequences into tiles.

        Args:
            query_start: ``[S + 1]``, where each sequence's rows start.
            prefilling: ``[S]`` bool, the sequences to compute.

        Returns:
            ``[P, 4]`` int32, see `PrefillTiles`; tiles with the most work first.
        """
        starts = query_start.astype(np.int64)
        fresh = np.where(prefilling, starts[1:] - starts[:-1], 0)
        counts = -(-fresh // self.tokens_per_tile)
        seq = np.repeat(np.arange(len(fresh)), counts)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = index * self.tokens_per_tile
        tiles = np.stack((seq, starts[seq], first, fresh[seq]), axis=1).astype(np.int32)
        return np.ascontiguousarray(tiles[np.argsort(-first, kind="stable")])

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        cache_lens: torch.Tensor,
        plan: PrefillTiles,
        out: torch.Tensor,
    ) -> None:
        """Attend; rows of `out` that belong to no tile are left alone.

        Args:
            layer: index of the layer.
            q: ``[rows, >= Q D]``, rows contiguous; queries after RoPE come first in each row.
            block_tables: ``[S, blocks]`` int32.
            cache_lens: ``[S]`` int32 valid slots, the new tokens included.
            plan: the tiles.
            out: ``[rows, Q D]``.
        """
        spec = self.cache.spec
        _prefill_kernel[(spec.num_kv_heads, len(plan.tiles))](
            q,
            self.cache.kv[layer],
            self.cache.kv_scales[layer],
            block_tables,
            cache_lens,
            plan.tiles,
            out,
            self._scale_log2,
            q.stride(0),
            block_tables.stride(0),
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            BLOCK_SIZE=spec.block_size,
            DIM=spec.head_dim,
            DIM_PADDED=self._dim_padded,
            ROWS=self._rows,
            TILE=self._tile,
            PRECISION="ieee" if spec.dtype == torch.float32 else "tf32",
            QUANTISED=spec.is_quantised,
            INVARIANT=self._invariant,
            num_warps=8 if self._rows >= 128 else 4,
            num_stages=3 if self._dim_padded <= 128 and spec.dtype.itemsize == 2 else 2,
        )
