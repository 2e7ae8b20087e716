"""Conversion to and from 8-bit floats (e4m3): device functions.

`zipage.cache.quantisation` and `zipage.models.fp8` are the references. Attention computes with
stored numbers in fp16, which holds them exactly; one instruction converts two of them, where bf16
would take five. Queries are scaled into fp16's range by a power of two per row. If the model runs
in fp32, so does attention.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_MAX: tl.constexpr = tl.constexpr(448.0)
_INF: tl.constexpr = tl.constexpr(0x7F800000)
# From here fp32 numbers are spaced like the smallest e4m3 numbers, by 2^-9.
_SUBNORMAL: tl.constexpr = tl.constexpr(16384.0)
_SUBNORMAL_BITS: tl.constexpr = tl.constexpr(0x46800000)
# Bits of 2^-6, the smallest normal number.
_NORMAL_BITS: tl.constexpr = tl.constexpr(0x3C800000)

_TO_FP16: tl.constexpr = tl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")


@triton.jit
def from_fp8(tokens, WIDE: tl.constexpr):
    """Stored numbers in fp16, or fp32 if `WIDE`; NaN stays NaN."""
    if _INTERPRETED:  # the interpreter does not know e4m3's NaN
        wide = tokens.to(tl.float32)
        wide = tl.where(tl.abs(wide) > _MAX, float("nan"), wide)
        numbers = wide if WIDE else wide.to(tl.float16)
    else:
        numbers = tl.inline_asm_elementwise(
            _TO_FP16, "=r,=r,r", [tokens], dtype=tl.float16, is_pure=True, pack=4
        )
        if WIDE:
            numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def to_fp8(x, scale):
    """``x / scale`` to the nearest, ties to even, in integer arithmetic; infinite becomes NaN."""
    wide = x.to(tl.float32)
    scaled = wide / scale
    magnitude = tl.minimum(tl.abs(scaled), _MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + _SUBNORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    code = tl.where(bits < _NORMAL_BITS, subnormal, normal)
    given = wide.to(tl.int32, bitcast=True)
    code = tl.where((given & 0x7FFFFFFF) >= _INF, 0x7F, code) | ((given >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def scale_of(values):
    """The scale of a row of these values: 1/448 of the largest; NaN if one is NaN."""
    peak = tl.max(tl.abs(values), 0)
    scale = tl.where(peak == 0.0, 1.0, peak / _MAX)
    # A maximum would ignore NaN.
    unusable = tl.sum((values != values).to(tl.int32), 0)
    return tl.where(unusable > 0, float("nan"), scale)


@triton.jit
def query_operand(query, WIDE: tl.constexpr):
    """Rows of queries ``[m, d]`` to be multiplied with `from_fp8`, and the factor of the products.

    The factor ``[m]`` is a power of two, so only numbers that fp16 cannot hold are rounded: those
    at 2^-24 of a row's largest and below.
    """
    if WIDE:
        factor = tl.full([query.shape[0]], 1.0, tl.float32)
    else:
        wide = query.to(tl.float32)
        peak = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & _INF
        # Rows that are zero or not finite are left unchanged.
        peak = tl.where((peak == 0) | (peak == _INF), 0x3F800000, peak)
        factor = peak.to(tl.float32, bitcast=True)
        query = (wide / factor[:, None]).to(tl.float16)
    return query, factor
