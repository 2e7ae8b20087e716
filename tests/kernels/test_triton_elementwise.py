"""The Triton norms and SiLU-mul, against torch in float64; their fp8 forms are in test_fp8.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.attention.paged import relative_error
from tests.kernels.devices import DEVICES
from zipage.kernels.triton.elementwise import add_rms_norm, silu_mul


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 200, 4100])
@pytest.mark.parametrize("count", [None, 0, 1, 3])
def test_norm_sums_the_parts_first(
    count: int | None, width: int, dtype: torch.dtype, device: str
) -> None:
    """`count` parts; None for a sum already made, which is the size of one part."""
    x = torch.randn(6, width, dtype=dtype, device=device)
    shape = (6, width) if count is None else (count, 6, width)
    parts = torch.randn(shape, device=device) if count != 0 else None
    weight = torch.randn(width, dtype=dtype, device=device)
    added = x.float()
    for part in () if parts is None else parts.view(-1, 6, width):
        added = added + part
    added = added.to(dtype)
    out = add_rms_norm(x, parts, weight, 1e-6)
    assert torch.equal(x, added)
    expected = F.rms_norm(added.double(), (width,), weight.double(), 1e-6)
    assert relative_error(out, expected) < (1e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 200, 4100])
def test_silu_mul(width: int, device: str) -> None:
    gate_up = 4 * torch.randn(5, 2 * width, device=device)
    gate, up = gate_up.double().chunk(2, 1)
    assert relative_error(silu_mul(gate_up), F.silu(gate) * up) < 1e-6
