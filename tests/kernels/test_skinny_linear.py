"""Products in parts, and the norm that sums them, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.attention.paged import relative_error
from zipage.kernels.triton.elementwise import add_rms_norm
from zipage.kernels.triton.skinny_linear import num_splits, skinny_linear

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 4), (17, 2), (64, 2)])
def test_parts_sum_to_the_product(rows: int, splits: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    x = torch.randn(rows, 512, dtype=dtype, device=device)
    weight = torch.randn(128, 512, dtype=dtype, device=device)
    parts = skinny_linear(x, weight, splits)
    assert parts.shape == (splits, rows, 128) and parts.dtype == torch.float32
    expected = x.double() @ weight.double().T
    assert relative_error(parts.double().sum(0), expected) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 200])
def test_norm_sums_the_parts_first(width: int, device: str) -> None:
    x = torch.randn(6, width, dtype=torch.float16, device=device)
    parts = torch.randn(3, 6, width, device=device)
    weight = torch.randn(width, dtype=torch.float16, device=device)
    added = (x.float() + parts[0] + parts[1] + parts[2]).half()
    out = add_rms_norm(x, parts, weight, 1e-6)
    assert torch.equal(x, added)
    expected = F.rms_norm(added.double(), (width,), weight.double(), 1e-6)
    assert relative_error(out, expected) < 1e-3


def test_splits_fill_the_device() -> None:
    """Enough programs where the shape allows it, always whole steps, else the library."""
    square = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert num_splits(48, square, 198) == 4
    assert num_splits(65, square, 198) is None
    wide = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")
    assert num_splits(48, wide, 198) == 1
    assert num_splits(1, torch.empty(1024, 384, dtype=torch.float16, device="meta"), 198) == 1
    for n, k in [(4096, 4000), (100, 4096)]:
        assert num_splits(8, torch.empty(n, k, dtype=torch.bfloat16, device="meta"), 198) is None
    assert num_splits(8, torch.empty(64, 128, device="meta"), 198) is None
