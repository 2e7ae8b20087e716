"""Keys and values as 8-bit floats (e4m3), with a scale per layer, KV head and K or V.

A scale is a power of two. Dividing by it is exact, and so is what kernels do with it: they compute
with the stored numbers and apply it to logits and outputs. Nothing is lost by that choice, since
the relative precision of a floating-point number does not depend on its scale, which only says
which range is represented: 448 down to 2^-6 at full precision, 2^-9 at all, in its units.
"""

from __future__ import annotations

import math

import torch

#: Values of the option `kv_cache_dtype` and how keys and values are stored; None: in the model's
#: dtype.
KV_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}

#: The largest number of e4m3, 448.
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
#: What is larger than the largest seen number by this factor is still represented. RoPE makes an
#: element of a key larger by sqrt(2) at most, so that other positions of the same tokens fit.
_MARGIN = 2.0
#: Heads in which a calibration sees next to nothing are scaled as if there was more.
_LEAST_SCALE = 2.0**-12


def scales_for(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales for numbers of a dtype.

    Args:
        largest: magnitudes to represent, fp32; 0 and what is not finite say nothing: scale 1.
        dtype: what the numbers are computed in; restored numbers do not overflow it.

    Returns:
        fp32 powers of two, of the same shape.
    """
    wanted = largest.nan_to_num(0.0, 0.0, 0.0) * (_MARGIN / FP8_MAX)
    most = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / FP8_MAX))
    mantissa, exponent = torch.frexp(wanted)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(wanted), exponent).clamp(_LEAST_SCALE, most)


def quantise(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bits (uint8) of ``x / scales``; too large numbers become the largest, infinite ones NaN.

    An infinite key makes no sense of a request, and must be seen as one that is NaN is.
    """
    scaled = (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).masked_fill(x.isinf(), torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantise(bits: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantise` stored, exactly."""
    return bits.view(torch.float8_e4m3fn).to(dtype) * scales.to(dtype)


def converts_fp8(device: torch.device) -> bool:
    """Whether a CUDA device converts e4m3 in hardware, as the Triton kernels have it do."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
