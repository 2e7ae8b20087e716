"""The fused elementwise kernels against torch in float64, and their independence of the batch."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from tests.attention.paged import relative_error
from zipage.kernels import native

pytestmark = pytest.mark.skipif(
    not native.available(), reason="no C compiler: native kernels cannot be built"
)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, threads: int
) -> torch.Tensor:
    kernel = native.load().zp_add_rms_norm
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (*(pointer,) * 3, ctypes.c_float, size, size, pointer, ctypes.c_int)
    out = torch.empty_like(x)
    added = None if delta is None else delta.data_ptr()
    kernel(x.data_ptr(), added, weight.data_ptr(), 1e-6, *x.shape, out.data_ptr(), threads)
    return out


def silu_mul(gate_up: torch.Tensor, threads: int) -> torch.Tensor:
    kernel = native.load().zp_silu_mul
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (pointer, size, size, pointer, ctypes.c_int)
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    kernel(gate_up.data_ptr(), *out.shape, out.data_ptr(), threads)
    return out


@pytest.mark.parametrize("width", [256, 576, 37, 3])
@pytest.mark.parametrize("rows", [1, 5, 400])
def test_add_rms_norm(rows: int, width: int) -> None:
    x, delta, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    expected = (x + delta).double()
    residual = x.clone()
    out = add_rms_norm(residual, delta, weight, 2)
    assert torch.equal(residual, x + delta)
    assert relative_error(out, F.rms_norm(expected, (width,), weight.double(), 1e-6)) < 1e-6
    plain = x.clone()
    out = add_rms_norm(plain, None, weight, 1)
    assert torch.equal(plain, x)
    assert relative_error(out, F.rms_norm(x.double(), (width,), weight.double(), 1e-6)) < 1e-6


@pytest.mark.parametrize("width", [768, 37, 3])
def test_silu_mul(width: int) -> None:
    gate_up = torch.randn(300, 2 * width) * 8
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    out = silu_mul(gate_up, 2)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert out.isfinite().all()
    # Rounding the exponent costs exp(-|x|) a relative error that grows with |x|.
    tolerance = (1e-6 + 1e-7 * gate.abs()) * expected.abs() + 1e-30
    assert ((out - expected).abs() <= tolerance).all()


def test_rows_do_not_depend_on_the_batch() -> None:
    x, delta, weight = torch.randn(400, 250), torch.randn(400, 250), torch.randn(250)
    residual = x.clone()
    normed, gated = add_rms_norm(residual, delta, weight, 3), silu_mul(x, 3)
    for i in (0, 7, 399):
        row = x[i : i + 1].clone()
        assert torch.equal(add_rms_norm(row, delta[i : i + 1].clone(), weight, 1)[0], normed[i])
        assert torch.equal(silu_mul(x[i : i + 1].clone(), 1)[0], gated[i])
