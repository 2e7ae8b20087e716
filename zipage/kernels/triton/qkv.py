"""QK-norm, RoPE, the write of keys and values to their blocks, and the capture of window queries.

One launch. Letters: T' rows, Q query heads, H KV heads, D head dim, R rotated width, b block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zipage.attention.backend import QKVTransform, StepInputs
from zipage.cache.kv_cache import KVCache
from zipage.kernels.triton.fp8 import to_fp8
from zipage.kernels.triton.launch import UNFUSED

# Heads a program handles.
_HEADS = 8


# One compiled kernel for all steps: a graph's inputs may have any alignment in its buffer.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping", "capture"])
def _qkv_kernel(
    qkv,  # [T', (Q + 2 H) D]
    kv,  # [N, 2, H, b, D] of the layer
    kv_scales,  # [2, H] of the layer
    queries,  # [M w, Q, D] of the layer
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slot_mapping,
    capture,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    CAPTURE: tl.constexpr,
    QUANTISED: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    rotated = is_query | is_key
    turn = tl.arange(0, HALF_PADDED)
    turns = turn < HALF
    dtype = qkv.dtype.element_ty

    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM
    half_mask = exists[:, None] & turns[None, :]
    first = tl.load(source + turn[None, :], mask=half_mask, other=0.0)
    second = tl.load(source + HALF + turn[None, :], mask=half_mask, other=0.0)
    if REST_PADDED > 0:
        kept = tl.arange(0, REST_PADDED)
        rest_mask = exists[:, None] & (kept < DIM - 2 * HALF)[None, :]
        rest = tl.load(source + 2 * HALF + kept[None, :], mask=rest_mask, other=0.0)

    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST_PADDED > 0:
            c = rest.to(tl.float32)
            squares += tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        first = _scale(first, factor, q_norm, k_norm, turn, turns, is_query, rotated)
        second = _scale(second, factor, q_norm, k_norm, HALF + turn, turns, is_query, rotated)
        if REST_PADDED > 0:
            there = kept < DIM - 2 * HALF
            rest = _scale(rest, factor, q_norm, k_norm, 2 * HALF + kept, there, is_query, rotated)

    position = tl.load(positions + row)
    cosine = tl.load(cos + position * HALF + turn, mask=turns, other=1.0)[None, :]
    sine = tl.load(sin + position * HALF + turn, mask=turns, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(rotated[:, None], (a * cosine - b * sine).to(dtype), first)
    second = tl.where(rotated[:, None], (b * cosine + a * sine).to(dtype), second)

    mask = half_mask & is_query[:, None]
    tl.store(source + turn[None, :], first, mask=mask)
    tl.store(source + HALF + turn[None, :], second, mask=mask)
    if REST_PADDED > 0:
        tl.store(source + 2 * HALF + kept[None, :], rest, mask=rest_mask & is_query[:, None])

    slot = tl.load(slot_mapping + row)
    if slot >= 0:
        # A block holds the keys of all heads, then the values of all heads.
        tile = (slot // BLOCK_SIZE) * (2 * NUM_KV_HEADS) + tl.maximum(head - NUM_HEADS, 0)
        target = kv + (tile * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * DIM
        written = exists & (head >= NUM_HEADS)
        kv_first, kv_second = first, second
        if REST_PADDED > 0:
            kv_rest = rest
        if QUANTISED:
            scale = tl.load(kv_scales + head - NUM_HEADS, mask=written, other=1.0)[:, None]
            kv_first, kv_second = to_fp8(first, scale), to_fp8(second, scale)
            if REST_PADDED > 0:
                kv_rest = to_fp8(rest, scale)
        written = written[:, None]
        tl.store(target + turn[None, :], kv_first, mask=half_mask & written)
        tl.store(target + HALF + turn[None, :], kv_second, mask=half_mask & written)
        if REST_PADDED > 0:
            tl.store(target + 2 * HALF + kept[None, :], kv_rest, mask=rest_mask & written)

    if CAPTURE:
        entry = tl.load(capture + row)
        if entry >= 0:
            target = queries + (entry * NUM_HEADS + head[:, None]) * DIM
            captured = is_query[:, None]
            tl.store(target + turn[None, :], first, mask=half_mask & captured)
            tl.store(target + HALF + turn[None, :], second, mask=half_mask & captured)
            if REST_PADDED > 0:
                tl.store(target + 2 * HALF + kept[None, :], rest, mask=rest_mask & captured)


@triton.jit
def _scale(x, factor, q_norm, k_norm, offsets, mask, is_query, normed):
    """RMSNorm's scaling of queries and keys, rounded before the weight as in the reference."""
    q_weight = tl.load(q_norm + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_norm + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    weight = tl.where(is_query[:, None], q_weight, k_weight)
    normal = (x.to(tl.float32) * factor).to(x.dtype).to(tl.float32)
    return tl.where(normed[:, None], (normal * weight).to(x.dtype), x)


def prepare_qkv(
    layer: int,
    qkv: torch.Tensor,
    transform: QKVTransform,
    step: StepInputs,
    cache: KVCache,
    capture: bool | None = None,
) -> None:
    """Norm and rotate queries in place, write keys and values to their slots, capture queries.

    The reference is the first half of `TorchBackend.attend`. Rows whose `slot_mapping` is -1 write
    nothing to the cache.

    Args:
        layer: index of the layer.
        qkv: ``[T', (Q + 2 H) D]``, contiguous; its query part is overwritten.
        transform: norms and RoPE.
        step: the step's metadata.
        cache: the KV pool.
        capture: whether to launch the kernel that can capture queries; None to launch it if `step`
            captures any.
    """
    capture = step.any_capture if capture is None else capture
    spec = cache.spec
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    half = transform.cos.shape[1]
    rest = dim - 2 * half
    half_padded = max(triton.next_power_of_2(half), 1)
    norm = transform.q_norm is not None
    grid = (len(qkv), triton.cdiv(heads + 2 * kv_heads, _HEADS))
    _qkv_kernel[grid](
        qkv,
        cache.kv[layer],
        cache.kv_scales[layer],
        cache.queries[layer] if capture else qkv,
        transform.q_norm if norm else qkv,
        transform.k_norm if norm else qkv,
        transform.cos,
        transform.sin,
        step.positions,
        step.slot_mapping,
        step.capture,
        transform.norm_eps,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        BLOCK_SIZE=spec.block_size,
        DIM=dim,
        HALF=half,
        HALF_PADDED=half_padded,
        REST_PADDED=triton.next_power_of_2(rest) if rest else 0,
        NORM=norm,
        CAPTURE=capture,
        QUANTISED=spec.is_quantised,
        HEADS=_HEADS,
        # No more threads than numbers: surplus threads would read numbers while they are written.
        num_warps=min(4, max(1, _HEADS * half_padded // 32)),
        **UNFUSED,
    )
