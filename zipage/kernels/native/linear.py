"""Linear layers with packed weights, native, fp32 on CPU.

Two to eight times as fast as torch's matrix products for the few rows of a decode step, and
each row's result depends on that row alone.
"""

from __future__ import annotations

import ctypes

import torch

from zipage.kernels import native


class PackedLinear:
    """``y = x W^T + bias`` with a copy of W laid out for the kernel.

    Args:
        weight: ``[N, K]`` fp32 on the CPU; not needed afterwards.
        bias: ``[N]`` or None.

    Raises:
        ValueError: the weight or bias is not fp32 on the CPU.
        NativeUnavailable: the kernels cannot be built on this machine.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        for tensor in (weight, bias):
            if tensor is not None and (tensor.dtype, tensor.device.type) != (torch.float32, "cpu"):
                raise ValueError(
                    f"packed weights are float32 on cpu, got {tensor.dtype} on {tensor.device}"
                )
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library = native.load()
        library.zp_linear_packed_size.argtypes = (size, size)
        library.zp_linear_packed_size.restype = size
        library.zp_linear_pack.argtypes = (pointer, size, size, pointer)
        library.zp_linear_pack.restype = None
        self._multiply = library.zp_linear
        self._multiply.argtypes = (
            *(pointer, size, size, pointer, size, pointer),
            *(pointer, ctypes.c_int),
        )
        self._multiply.restype = None
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.contiguous()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        weight = weight.contiguous()
        size = library.zp_linear_packed_size(*weight.shape)
        self._packed = torch.empty(size, dtype=torch.float32, device="cpu")
        library.zp_linear_pack(weight.data_ptr(), *weight.shape, self._packed.data_ptr())
        self._packed_pointer = self._packed.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [rows, K]``, contiguous fp32, to ``[rows, N]``."""
        y = torch.empty(x.shape[0], self.out_features, dtype=torch.float32, device="cpu")
        self._run(x, y)
        return y

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product to ``y [rows, N]``, contiguous fp32, in place."""
        if y.shape != (x.shape[0], self.out_features) or not _fits(y):
            raise ValueError(
                f"cannot add a product of {self.out_features} columns to {y.dtype} {y.shape}"
            )
        # Summed first: added to a large residual, each product would be rounded to its magnitude.
        y.add_(self(x))

    def _run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape[1] != self.in_features or not _fits(x):
            raise ValueError(
                f"expected contiguous float32 [rows, {self.in_features}], got {x.dtype} {x.shape}"
            )
        self._multiply(
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            self._packed_pointer,
            self.out_features,
            self._bias_pointer,
            y.data_ptr(),
            torch.get_num_threads(),
        )


def _fits(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"
