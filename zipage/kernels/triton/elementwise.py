"""RMSNorm and SiLU-mul of a decoder layer, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zipage.kernels.triton.fp8 import scale_of, to_fp8


@triton.jit
def _add_rms_norm_kernel(
    x,  # [M, E]; the sum is written to it, if there are parts
    parts,  # [PARTS, M, E]
    weight,  # [E]
    out,  # [M, E]
    scales,  # [M, 1], if QUANTISE
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    mask = column < WIDTH
    at = row * WIDTH + column
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        size = tl.num_programs(0).to(tl.int64) * WIDTH
        for part in tl.static_range(PARTS):
            values += tl.load(parts + part * size + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = values * factor * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if QUANTISE:
        scale = scale_of(normed)
        tl.store(scales + row, scale)
        tl.store(out + at, to_fp8(normed, scale), mask=mask)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm_into(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """`add_rms_norm` that writes its result to `out`.

    Args:
        x: ``[T', E]``.
        parts: ``[S, T', E]`` or ``[T', E]``, or None to add nothing.
        weight: ``[E]``.
        eps: added to the mean of squares.
        out: ``[T', E]``.
        scales: ``[T', 1]`` fp32, written if `out` is in fp8.
    """
    width = x.shape[-1]
    padded = triton.next_power_of_2(width)
    count = 0 if parts is None else 1 if parts.shape == x.shape else len(parts)
    _add_rms_norm_kernel[(len(x),)](
        x,
        x if parts is None else parts,
        weight,
        out,
        x if scales is None else scales,
        eps,
        PARTS=count,
        WIDTH=width,
        WIDTH_PADDED=padded,
        QUANTISE=scales is not None,
        num_warps=min(16, max(1, padded // 512)),
    )


def add_rms_norm(
    x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add the parts of a product to `x` in place, rounded once, and return its RMSNorm.

    ``x / rms(x) * weight`` over rows, in fp32, rounded once; the reference is
    ``torch.nn.functional.rms_norm``.

    Args:
        x: ``[T', E]``.
        parts: ``[S, T', E]`` from `skinny_linear`, ``[T', E]``, or None to add nothing.
        weight: ``[E]``.
        eps: added to the mean of squares.
    """
    out = torch.empty_like(x)
    add_rms_norm_into(x, parts, weight, eps, out)
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    source = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + WIDTH, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two operations, as in the reference.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[T', 2 I]``, gates first: ``[T', I]``."""
    rows, double = gate_up.shape
    width = double // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    tile = min(2048, triton.next_power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, tile))](
        gate_up, out, WIDTH=width, TILE=tile, num_warps=4
    )
    return out
