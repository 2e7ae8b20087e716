"""Kernels around the device functions of `zipage.kernels.triton.fp8`."""

import triton
import triton.language as tl

from zipage.kernels.triton.fp8 import from_fp8, to_fp8


@triton.jit
def encode_numbers(x, out, scale, count, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + i, to_fp8(tl.load(x + i, mask=i < count, other=0.0), scale), mask=i < count)


@triton.jit
def decode_bytes(codes, out, WIDE: tl.constexpr, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    tl.store(out + i, from_fp8(tl.load(codes + i), WIDE))
