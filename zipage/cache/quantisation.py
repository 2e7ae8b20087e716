"""Keys and values as 8-bit floats (e4m3), with a scale per layer, KV head and K or V.

A scale is a power of two. Dividing by it is exact, and so is its use in kernels, which compute with
the stored numbers and apply the scale to logits and outputs. Restricting scales to powers of two
loses nothing: the relative precision of a floating-point number does not depend on its scale, which
only sets the range. In units of the scale that is 448 down to 2^-6 at full precision, and down to
2^-9 with less.
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
#: Numbers up to this factor above the largest one seen are still represented. RoPE enlarges an
#: element of a key by at most sqrt(2), so the same tokens fit at other positions.
_MARGIN = 2.0
#: Smallest scale, for heads in which the calibration sees next to nothing.
_LEAST_SCALE = 2.0**-12


def scales_for(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales for numbers of a dtype.

    Args:
        largest: magnitudes to represent, fp32; 0 and values that are not finite give scale 1.
        dtype: dtype of computations; dequantised numbers do not overflow it.

    Returns:
        fp32 powers of two, of the same shape.
    """
    wanted = largest.nan_to_num(0.0, 0.0, 0.0) * (_MARGIN / FP8_MAX)
    most = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / FP8_MAX))
    mantissa, exponent = torch.frexp(wanted)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(wanted), exponent).clamp(_LEAST_SCALE, most)


def quantise(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bits (uint8) of ``x / scales``, saturated at the largest number; infinity becomes NaN.

    An infinite key ruins a request, and must remain noticeable as NaN.
    """
    scaled = (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).masked_fill(x.isinf(), torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantise(bits: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `quantise` stored, exactly."""
    return bits.view(torch.float8_e4m3fn).to(dtype) * scales.to(dtype)


def converts_fp8(device: torch.device) -> bool:
    """Whether a CUDA device converts e4m3 in hardware, as the Triton kernels have it do."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
