"""Attention of single new tokens over paged caches, split along the cache (Flash-Decoding).

The work of a step is a list of units, each a range of one sequence's cache, held by `DecodeUnits`.
A fixed number of programs takes (unit, KV head) pairs in turn, so that a captured graph serves any
lengths; a second kernel joins the units of a sequence. Query heads of a KV head are computed
together, so each key and value is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from zipage.cache.kv_cache import KVCache
from zipage.kernels.triton.fp8 import from_fp8, query_operand
from zipage.kernels.triton.launch import num_multiprocessors

# Bytes of keys a program loads at once, and the most slots.
_TILE_BYTES = 32768
_TILE = 128
_PROGRAMS_PER_SM = 3
# Most (unit, head) pairs per program; a unit is never smaller than one tile.
_MOST_PAIRS = 8
# Cost of starting and joining a unit, in slots.
_UNIT_OVERHEAD = 48


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q,  # [rows, q_stride]
    kv,  # [N, 2, H, b, D] of the layer
    kv_scales,  # [2, H] of the layer
    tables,  # [S, table_stride]
    units,  # [U, 4] sequence, row of q, first slot, end slot
    num_units,  # [1]
    partial,  # [U, Q, D] fp32
    partial_lse,  # [U, Q] fp32
    scale_log2,
    q_stride,
    table_stride,
    num_programs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    member = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    time = tl.arange(0, TILE)
    dims = dim < DIM
    query_mask = (member < GROUP)[:, None] & dims[None, :]
    count = tl.load(num_units) * NUM_KV_HEADS
    for pair in range(tl.program_id(0), count, num_programs):
        unit = pair // NUM_KV_HEADS
        kv_head = pair % NUM_KV_HEADS
        seq = tl.load(units + unit * 4)
        row = tl.load(units + unit * 4 + 1)
        start = tl.load(units + unit * 4 + 2)
        end = tl.load(units + unit * 4 + 3)
        head = kv_head * GROUP + member
        query = tl.load(
            q + row.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        if QUANTISED:
            wide: tl.constexpr = q.dtype.element_ty == tl.float32
            query, factor = query_operand(query, wide)
            logit_scale = (factor * (scale_log2 * tl.load(kv_scales + kv_head)))[:, None]
        else:
            logit_scale = scale_log2
        top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        out = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
        table = tables + seq * table_stride
        for first in range(start, end, TILE):
            slot = first + time
            valid = slot < end
            if BLOCK_SIZE % TILE == 0:
                block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
                entry = (
                    (block * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE
                ) + time
            else:
                block = tl.load(table + slot // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
                entry = (block * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
            mask = valid[:, None] & dims[None, :]
            pointer = kv + entry[:, None] * DIM + dim[None, :]
            key = tl.load(pointer, mask=mask, other=0.0)
            value = tl.load(pointer + NUM_KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
            if QUANTISED:
                key = from_fp8(key, wide)
                value = from_fp8(value, wide)
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * logit_scale
            logits = tl.where(valid[None, :], logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            out = out * shrink[:, None] + tl.dot(
                weights.to(value.dtype), value, input_precision=PRECISION
            )
            top = new_top
        if QUANTISED:
            out *= tl.load(kv_scales + NUM_KV_HEADS + kv_head)
        entry = unit * NUM_HEADS + head
        tl.store(
            partial + entry[:, None] * DIM + dim[None, :], out / total[:, None], mask=query_mask
        )
        tl.store(partial_lse + entry, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def _join_kernel(
    partial,
    partial_lse,
    unit_starts,  # [S + 1]
    units,
    out,  # [rows, Q, D]
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    FILL: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM_PADDED)
    mask = (head < NUM_HEADS)[:, None] & (dim < DIM)[None, :]
    start = tl.load(unit_starts + seq)
    end = tl.load(unit_starts + seq + 1)
    if start < end:
        row = tl.load(units + start * 4 + 1).to(tl.int64)
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        joined = tl.zeros([HEADS, DIM_PADDED], tl.float32)
        for unit in range(start, end):
            entry = unit * NUM_HEADS + head
            lse = tl.load(partial_lse + entry, mask=head < NUM_HEADS, other=float("-inf"))
            part = tl.load(partial + entry[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, lse)
            # Padding heads keep -inf: their difference must not become NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - base)
            shrink = tl.exp2(top - base)
            joined = joined * shrink[:, None] + part * weight[:, None]
            total = total * shrink + weight
            top = new_top
        result = joined / tl.where(total == 0.0, 1.0, total)[:, None]
        pointer = out + (row * NUM_HEADS + head[:, None]) * DIM + dim[None, :]
        tl.store(pointer, result.to(out.dtype.element_ty), mask=mask)
    elif FILL:
        pointer = out + (seq.to(tl.int64) * NUM_HEADS + head[:, None]) * DIM + dim[None, :]
        tl.store(pointer, tl.zeros([HEADS, DIM_PADDED], out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class DecodeUnits:
    """The units of a step on the device.

    Attributes:
        units: ``[U', 4]`` int32: sequence, row of its query, first slot, end slot.
        unit_starts: ``[S' + 1]`` int32: the units of sequence s are
            ``[starts[s], starts[s + 1])``; none if it is not decoding.
        num_units: ``[1]`` int32, U <= U'.
        fill: whether row s of the output is zeroed where sequence s has no units; S' is then the
            number of rows.
    """

    units: torch.Tensor
    unit_starts: torch.Tensor
    num_units: torch.Tensor
    fill: bool


class DecodeAttention:
    """The decode kernels of one KV cache and their workspace.

    Args:
        cache: the KV pool.
        scale: factor of the attention logits.
        max_sequences: most decoding sequences of a step.
    """

    def __init__(self, cache: KVCache, scale: float, max_sequences: int) -> None:
        spec = cache.spec
        self.cache = cache
        self._max_sequences = max_sequences
        self._scale_log2 = scale * 1.4426950408889634
        row = max(16, triton.next_power_of_2(spec.head_dim)) * spec.dtype.itemsize
        self._tile = min(_TILE, _TILE_BYTES // row)
        self.set_programs(_PROGRAMS_PER_SM * num_multiprocessors(spec.device))

    def set_programs(self, count: int) -> None:
        """Run this many programs; allocates the workspace for the most units they can need."""
        spec = self.cache.spec
        self.num_programs = count
        self.max_units = self._max_sequences + -(-_MOST_PAIRS * count // spec.num_kv_heads)
        shape = (self.max_units, spec.num_heads)
        fp32 = torch.float32
        self._partial = torch.empty(*shape, spec.head_dim, dtype=fp32, device=spec.device)
        self._partial_lse = torch.empty(shape, dtype=fp32, device=spec.device)

    def plan(
        self, cache_lens: np.ndarray, rows: np.ndarray, decoding: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Split the caches of the decoding sequences into units of about equal size.

        Args:
            cache_lens: ``[S]`` valid slots.
            rows: ``[S]`` row of each sequence's query.
            decoding: ``[S]`` bool, the sequences to compute.

        Returns:
            units: ``[U, 4]`` int32, and unit_starts ``[S + 1]`` int32; see `DecodeUnits`.
        """
        lens = np.where(decoding, cache_lens, 0).astype(np.int64)
        size, counts = self._cut(lens)
        starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        seq = np.repeat(np.arange(len(lens)), counts)
        first = (np.arange(starts[-1]) - starts[seq]) * size[seq]
        units = np.empty((starts[-1], 4), dtype=np.int32)
        units[:, 0] = seq
        units[:, 1] = rows[seq]
        units[:, 2] = first
        units[:, 3] = np.minimum(first + size[seq], lens[seq])
        return units, starts

    def _cut(self, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Size and number of each sequence's units, so that the last program ends earliest."""
        heads, programs = self.cache.spec.num_kv_heads, self.num_programs
        total = int(lens.sum())
        best_end, best = 0, (lens, lens)
        for pairs in (1, 2, 3, 4, 6, _MOST_PAIRS):
            wanted = -(-total * heads // (programs * pairs))
            wanted = -(-max(wanted, 1) // self._tile) * self._tile
            counts = -(-lens // wanted)
            # Units of a sequence are equal, in whole tiles.
            size = -(-lens // np.maximum(counts, 1))
            size = -(-size // self._tile) * self._tile
            counts = -(-lens // np.maximum(size, 1))
            turns = -(-int(counts.sum()) * heads // programs)
            end = turns * (int(size.max()) + _UNIT_OVERHEAD)
            if not best_end or end < best_end:
                best_end, best = end, (size, counts)
        return best

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        plan: DecodeUnits,
        out: torch.Tensor,
    ) -> None:
        """Attend; rows of `out` that belong to no unit are left alone, or zeroed (`fill`).

        Args:
            layer: index of the layer.
            q: ``[rows, >= Q D]``, rows contiguous; queries after RoPE come first in each row.
            block_tables: ``[S, blocks]`` int32.
            plan: the units.
            out: ``[rows, Q D]``.
        """
        spec = self.cache.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        dim_padded = max(16, triton.next_power_of_2(dim))
        _decode_kernel[(self.num_programs,)](
            q,
            self.cache.kv[layer],
            self.cache.kv_scales[layer],
            block_tables,
            plan.units,
            plan.num_units,
            self._partial,
            self._partial_lse,
            self._scale_log2,
            q.stride(0),
            block_tables.stride(0),
            self.num_programs,
            NUM_HEADS=heads,
            NUM_KV_HEADS=kv_heads,
            BLOCK_SIZE=spec.block_size,
            DIM=dim,
            DIM_PADDED=dim_padded,
            GROUP_PADDED=max(16, triton.next_power_of_2(heads // kv_heads)),
            TILE=self._tile,
            PRECISION="ieee" if spec.dtype == torch.float32 else "tf32",
            QUANTISED=spec.is_quantised,
            num_warps=4,
            num_stages=2,
        )
        at_once = min(8, triton.next_power_of_2(heads))
        _join_kernel[(len(plan.unit_starts) - 1, triton.cdiv(heads, at_once))](
            self._partial,
            self._partial_lse,
            plan.unit_starts,
            plan.units,
            out,
            NUM_HEADS=heads,
            DIM=dim,
            DIM_PADDED=dim_padded,
            HEADS=at_once,
            FILL=plan.fill,
            num_warps=4,
        )
