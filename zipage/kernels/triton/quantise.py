"""Norm, SiLU-mul and plain rows in fp8, one launch each: the inputs of fp8 products.

The reference is `zipage.models.fp8.TorchElementwise`. One program handles one row, so that its
scale, 1/448 of its largest value, is known before anything is written.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from zipage.kernels.triton.elementwise import add_rms_norm, add_rms_norm_into
from zipage.kernels.triton.fp8 import scale_of, to_fp8
from zipage.kernels.triton.skinny_linear import plan_skinny, scaled_skinny_linear
from zipage.models.fp8 import FP8, Fp8Rows

# Values of a row that a program holds at once if it reads the row twice.
_TILE = 4096


@triton.jit
def _gated(source, column, mask, WIDTH: tl.constexpr, SILU_MUL: tl.constexpr):
    """Values of a row: unchanged, or SiLU of the gate times the value WIDTH columns later."""
    values = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    if SILU_MUL:
        up = tl.load(source + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * up
    return values


@triton.jit
def _rows_kernel(
    x,  # [M, K], or [M, 2 K]
    out,  # [M, K]
    scales,  # [M, 1]
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = x + row * (WIDTH * (2 if SILU_MUL else 1))
    peaks = tl.zeros([TILE], tl.float32)
    for first in range(0, WIDTH, TILE):
        column = first + tl.arange(0, TILE)
        values = tl.abs(_gated(source, column, column < WIDTH, WIDTH, SILU_MUL))
        # Written so that NaN propagates.
        peaks = tl.where(values <= peaks, peaks, values)
    scale = scale_of(peaks)
    tl.store(scales + row, scale)
    for first in range(0, WIDTH, TILE):
        column = first + tl.arange(0, TILE)
        mask = column < WIDTH
        values = _gated(source, column, mask, WIDTH, SILU_MUL)
        tl.store(out + row * WIDTH + column, to_fp8(values, scale), mask=mask)


class TritonElementwise:
    """`zipage.models.fp8.Elementwise` on CUDA."""

    def quantise(self, x: torch.Tensor) -> Fp8Rows:
        return _rows(x, x.shape[1], silu_mul=False)

    def quantise_silu_mul(self, gate_up: torch.Tensor) -> Fp8Rows:
        return _rows(gate_up, gate_up.shape[1] // 2, silu_mul=True)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x, delta, weight, eps)

    def quantise_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Fp8Rows:
        out = _empty_rows(x, x.shape[1])
        add_rms_norm_into(x, delta, weight, eps, out.values, out.scales)
        return out


class SkinnyProducts:
    """`zipage.models.fp8.SmallProducts`: torch's scaled product takes twice as long for them.

    Args:
        processors: multiprocessors of the device.
        memory: bytes of shared memory a program may use.
    """

    def __init__(self, processors: int, memory: int) -> None:
        self._processors, self._memory = processors, memory

    def product(
        self, x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        plan = plan_skinny(len(x.values), weight, self._processors, self._memory)
        if plan is None:
            return None
        return scaled_skinny_linear(x, weight, scale, replace(plan, splits=1), dtype)[0]

    def parts(self, x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
        plan = plan_skinny(len(x.values), weight, self._processors, self._memory)
        if plan is None:
            return None
        return scaled_skinny_linear(x, weight, scale, plan, torch.float32)


def _empty_rows(like: torch.Tensor, width: int) -> Fp8Rows:
    return Fp8Rows(
        torch.empty(len(like), width, dtype=FP8, device=like.device),
        torch.empty(len(like), 1, dtype=torch.float32, device=like.device),
    )


def _rows(x: torch.Tensor, width: int, silu_mul: bool) -> Fp8Rows:
    out = _empty_rows(x, width)
    tile = min(_TILE, triton.next_power_of_2(width))
    _rows_kernel[(len(x),)](
        x, out.values, out.scales, WIDTH=width, TILE=tile, SILU_MUL=silu_mul, num_warps=8
    )
    return out
