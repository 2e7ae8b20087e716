"""RMSNorm and SiLU-mul of a decoder layer, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    mask = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * factor * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over rows of ``[T', E]``, in fp32, rounded once.

    The reference is ``torch.nn.functional.rms_norm``.
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    padded = triton.next_power_of_2(width)
    warps = min(16, max(1, padded // 512))
    _rms_norm_kernel[(len(x),)](
        x, weight, out, eps, WIDTH=width, WIDTH_PADDED=padded, num_warps=warps
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x,  # [rows, WIDTH]
    parts,  # [PARTS, rows, WIDTH] fp32
    weight,
    out,
    eps,
    rows,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    mask = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        values += tl.load(parts + (part * rows + row) * WIDTH + column, mask=mask, other=0.0)
    rounded = values.to(x.dtype.element_ty)
    tl.store(x + row * WIDTH + column, rounded, mask=mask)
    values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * factor * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add the parts of a product to `x` in place, rounded once, and return its `rms_norm`.

    Args:
        x: ``[T', E]``.
        parts: ``[S, T', E]`` fp32, from `skinny_linear`.
        weight: ``[E]``.
        eps: added to the mean of squares.
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    padded = triton.next_power_of_2(width)
    warps = min(16, max(1, padded // 512))
    _add_rms_norm_kernel[(len(x),)](
        x,
        parts,
        weight,
        out,
        eps,
        len(x),
        PARTS=len(parts),
        WIDTH=width,
        WIDTH_PADDED=padded,
        num_warps=warps,
    )
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
