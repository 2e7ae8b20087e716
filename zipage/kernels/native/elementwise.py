"""Fused elementwise steps of a decoder layer, native, fp32 on CPU.

A row's result does not depend on the other rows or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from zipage.kernels import native

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


@functools.lru_cache(maxsize=1)
def _add_rms_norm() -> Callable[..., None]:
    kernel = native.load().zp_add_rms_norm
    kernel.argtypes = (*(_POINTER,) * 3, ctypes.c_float, _SIZE, _SIZE, _POINTER, ctypes.c_int)
    kernel.restype = None
    return kernel


@functools.lru_cache(maxsize=1)
def _silu_mul() -> Callable[..., None]:
    kernel = native.load().zp_silu_mul
    kernel.argtypes = (_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_int)
    kernel.restype = None
    return kernel


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to the residual `x` in place and return the RMSNorm of the sum.

    Args:
        x: ``[rows, width]`` contiguous fp32.
        delta: has the same shape; None to add nothing.
        weight: ``[width]``.
        eps: epsilon of the norm.

    Returns:
        ``[rows, width]``.
    """
    _check(x, delta, weight)
    rows, width = x.shape
    out = torch.empty_like(x)
    _add_rms_norm()(
        x.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        eps,
        rows,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [rows, 2 * width]``, gates first: ``[rows, width]``."""
    _check(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=torch.float32, device="cpu")
    _silu_mul()(gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
    return out


def _check(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            raise ValueError(f"expected contiguous float32, got {tensor.dtype} {tensor.stride()}")
