"""The fused elementwise kernels against torch in float64, and their independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.attention.paged import relative_error
from zipage.kernels import native
from zipage.kernels.native.elementwise import add_rms_norm, silu_mul

pytestmark = pytest.mark.skipif(
    not native.available(), reason="no C compiler: native kernels cannot be built"
)


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [256, 576, 37, 3])
@pytest.mark.parametrize("rows", [1, 5, 400])
def test_add_rms_norm(rows: int, width: int) -> None:
    x, delta, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    expected = (x + delta).double()
    residual = x.clone()
    out = add_rms_norm(residual, delta, weight, 1e-6)
    assert torch.equal(residual, x + delta)
    assert relative_error(out, F.rms_norm(expected, (width,), weight.double(), 1e-6)) < 1e-6
    plain = x.clone()
    out = add_rms_norm(plain, None, weight, 1e-6)
    assert torch.equal(plain, x)
    assert relative_error(out, F.rms_norm(x.double(), (width,), weight.double(), 1e-6)) < 1e-6


@pytest.mark.parametrize("width", [768, 37, 3])
def test_silu_mul(width: int) -> None:
    gate_up = torch.randn(300, 2 * width) * 8
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    out = silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert out.isfinite().all()
    # Rounding the exponent costs exp(-|x|) a relative error that grows with |x|.
    tolerance = (1e-6 + 1e-7 * gate.abs()) * expected.abs() + 1e-30
    assert ((out - expected).abs() <= tolerance).all()


def test_rows_do_not_depend_on_the_batch() -> None:
    x, delta, weight = torch.randn(400, 250), torch.randn(400, 250), torch.randn(250)
    normed, gated = add_rms_norm(x.clone(), delta, weight, 1e-6), silu_mul(x)
    torch.set_num_threads(1)
    for i in (0, 7, 399):
        row = slice(i, i + 1)
        assert torch.equal(add_rms_norm(x[row].clone(), delta[row], weight, 1e-6), normed[row])
        assert torch.equal(silu_mul(x[row]), gated[row])


def test_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        silu_mul(torch.randn(4, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(torch.randn(8, 4).T, None, torch.ones(8), 1e-6)
