"""Addresses of a request's tokens in the pool: device functions of the compression kernels.

Shapes as in `zipage.cache.kv_cache`: keys and values ``[L, N, 2, H, b, D]``, state
``[L, N, H, b]``. Offsets are 64-bit, as a pool may hold more than 2^31 elements.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def products(a, b):
    """``a @ b^T`` of ``[m, d]`` and ``[n, d]`` in fp32, without rounding fp32 operands to tf32."""
    if _INTERPRETED:  # the interpreter keeps bf16 as raw bits, and would multiply those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def token_rows(
    table,
    slot,
    mask,
    layer,
    head,
    which,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Offsets of the keys (`which` 0) or values (1) in cache slots `slot`."""
    block = tl.load(table + slot // BLOCK, mask=mask, other=0).to(tl.int64)
    page = (layer.to(tl.int64) * num_blocks + block) * 2 + which
    return ((page * KV_HEADS + head) * BLOCK + slot % BLOCK) * DIM


@triton.jit
def state_slots(
    table, slot, mask, layer, head, num_blocks, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Offsets of the stored scores and positions of cache slots `slot`."""
    block = tl.load(table + slot // BLOCK, mask=mask, other=0).to(tl.int64)
    return ((layer.to(tl.int64) * num_blocks + block) * KV_HEADS + head) * BLOCK + slot % BLOCK


@triton.jit
def text_positions(
    positions,
    table,
    slot,
    mask,
    layer,
    head,
    num_blocks,
    num_scored,
    first_position,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Text positions of cache slots `slot`: stored ones below `num_scored`, else in slot order."""
    is_stored = slot < num_scored
    at = state_slots(table, slot, mask, layer, head, num_blocks, KV_HEADS, BLOCK)
    stored = tl.load(positions + at, mask=mask & is_stored, other=0)
    return tl.where(is_stored, stored, first_position + slot)
