"""Products in parts, against torch in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.attention.paged import relative_error
from tests.kernels.devices import DEVICES
from zipage.kernels.triton.quantise import SkinnyProducts
from zipage.kernels.triton.skinny_linear import (
    SkinnyPlan,
    plan_skinny,
    scaled_skinny_linear,
    skinny_linear,
)
from zipage.models.fp8 import FP8, Fp8Rows, quantise

#: Shared memory of a program, by compute capability.
H200, MEMORY = 232448, {"7.5": 65536, "8.0": 166912, "8.9": 101376, "9.0": 232448}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 4), (17, 2), (64, 2), (100, 2)])
def test_parts_sum_to_the_product(rows: int, splits: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    x = torch.randn(rows, 512, dtype=dtype, device=device)
    weight = torch.randn(128, 512, dtype=dtype, device=device)
    parts = skinny_linear(x, weight, SkinnyPlan(splits, 128, 4 if rows > 64 else 3))
    assert parts.shape == (splits, rows, 128) and parts.dtype == torch.float32
    expected = x.double() @ weight.double().T
    assert relative_error(parts.double().sum(0), expected) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 2), (100, 2)])
def test_fp8_parts_sum_to_the_product(rows: int, splits: int, device: str) -> None:
    x = quantise(torch.randn(rows, 512, device=device) * 3)
    weight = quantise(torch.randn(128, 512, device=device))
    scale = weight.scales[:, 0].contiguous()
    expected = (x.values.double() * x.scales) @ (weight.values.double() * weight.scales).T
    plan = SkinnyPlan(splits, 256, 4)
    parts = scaled_skinny_linear(x, weight.values, scale, plan, torch.float32)
    assert parts.shape == (splits, rows, 128)
    # The matrix units of Hopper keep 14 bits of the sums of 128 products.
    assert relative_error(parts.double().sum(0), expected) < (1e-6 if device == "cpu" else 1e-3)
    products = SkinnyProducts(132, H200)
    whole = products.product(x, weight.values, scale, torch.float16)
    assert whole is not None and whole.dtype == torch.float16
    assert relative_error(whole, expected) < 1e-3
    summed = products.parts(x, weight.values, scale)
    assert summed is not None and relative_error(summed.double().sum(0), expected) < 1e-3
    assert (
        products.parts(Fp8Rows(x.values[:1].expand(129, -1), x.scales), weight.values, scale)
        is None
    )


def test_splits_fill_the_device() -> None:
    """Enough programs where the shape allows it, always whole steps, else the library."""

    def splits(rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> int | None:
        plan = plan_skinny(rows, torch.empty(n, k, dtype=dtype, device="meta"), 132, H200)
        assert plan is None or k % (plan.splits * plan.step) == 0
        return plan and plan.splits

    assert splits(48, 4096, 4096) == 4
    assert splits(65, 4096, 4096) == splits(128, 4096, 12288) == 2
    assert splits(96, 1024, 2048) == 8 and splits(129, 4096, 4096) is None
    # Idle multiprocessors, or a second turn of some.
    assert splits(96, 5120, 5120) is None and splits(96, 24576, 4096) is None
    assert splits(48, 24576, 4096) == 1
    assert splits(1, 1024, 384, torch.float16) == 1
    assert splits(8, 4096, 4000) is None and splits(8, 100, 4096) is None
    assert splits(8, 64, 128, torch.float32) is None
    assert splits(96, 4096, 12288, FP8) == 2 and splits(96, 6144, 4096, FP8) == 1
    assert splits(96, 24576, 4096, FP8) == 1 and splits(129, 4096, 4096, FP8) is None
    assert splits(8, 4096, 128, FP8) is None


@pytest.mark.parametrize("capability", MEMORY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_steps_in_flight_fit_the_shared_memory(dtype: torch.dtype, capability: str) -> None:
    """Of GPUs with less than an H200, which can keep four of 128 rows."""
    memory, plans = MEMORY[capability], {}
    for rows in (1, 16, 17, 33, 64, 65, 128):
        for n, k in ((4096, 4096), (24576, 4096)):
            weight = torch.empty(n, k, dtype=dtype, device="meta")
            plan = plan_skinny(rows, weight, 128, memory)
            plans[rows, n] = plan
            padded = 16 if rows <= 16 else 1 << (rows - 1).bit_length()
            size = (64 + padded) * (plan.step if plan else 0) * dtype.itemsize
            assert plan is None or (plan.stages >= 2 and plan.stages * size <= memory)
    assert plans[1, 4096] is not None
    # Of two bytes the library is faster, but for a deep pipeline.
    small = memory < 4 * (64 + 128) * 256
    assert (plans[128, 4096] is None) == (small and (dtype != FP8 or capability == "7.5"))
