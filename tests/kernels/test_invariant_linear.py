"""Batch-invariant products: right, and every row bitwise its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.attention.paged import relative_error
from tests.kernels.devices import DEVICES, SANITIZED
from zipage.kernels.triton import linear as kernels
from zipage.kernels.triton.linear import linear, scaled_linear
from zipage.models.fp8 import Fp8Rows, quantise

#: (outputs, inputs) with and without whole tiles; on a GPU also those of a large model.
SHAPES = [(96, 256), (70, 150)]
LARGE = [(6144, 4096), (24576, 4096), (4096, 12288)]
#: (first, last + 1) of the rows compared with the same rows of the whole.
PLACES = [(0, 1), (3, 4), (0, 63), (5, 128), (64, 65), (129, 130), (1, 130)]
if SANITIZED:  # tiles of few and of many outputs, and more steps than the pipeline has stages
    LARGE = [(192, 512), (256, 512)]
    PLACES = [(5, 128)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def fewer_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    if SANITIZED:
        monkeypatch.setattr(kernels, "_FEW_OUTPUTS", 256)


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add products of every row in the same order, which BLAS does not."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        total: np.ndarray = (a[:, :, None] * b[None]).astype(dtype or a.dtype).sum(1)
        return total

    if not torch.cuda.is_available():
        monkeypatch.setattr(np, "matmul", matmul)


def dtypes(device: str) -> list[torch.dtype]:
    # The interpreter rounds bfloat16 otherwise.
    return [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_against_float64(device: str) -> None:
    shapes = SHAPES if device == "cpu" else SHAPES + LARGE
    for shape, dtype in itertools.product(shapes, dtypes(device)):
        outputs, inputs = shape
        put: dict[str, Any] = {"device": device, "dtype": dtype}
        x, weight, bias = randn(70, inputs, **put), randn(*shape, **put), randn(outputs, **put)
        exact = x.double() @ weight.double().t()
        # The rounding errors of a long sum in fp32 grow with the square root of its length.
        tolerance = max(TOLERANCE[dtype], 6e-8 * inputs**0.5)
        assert relative_error(linear(x, weight), exact) < tolerance
        biased = linear(x, weight, bias)
        assert relative_error(biased, exact + bias.double()) < tolerance
        out = randn(70, outputs, **put)
        expected = exact + bias.double() + out.double()
        assert linear(x, weight, bias, out=out, add=True) is out
        assert relative_error(out, expected) < tolerance
        assert linear(x[:0], weight).shape == (0, outputs)


def rows_of(x: Fp8Rows, rows: slice) -> Fp8Rows:
    return Fp8Rows(x.values[rows], x.scales[rows])


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_against_float64(device: str) -> None:
    x, weight = quantise(randn(70, 160, device=device)), quantise(randn(96, 160, device=device))
    bias = randn(96, device=device)
    out = scaled_linear(x, weight.values, weight.scales[:, 0], bias, torch.float16)
    exact = (x.values.double() * x.scales) @ (weight.values.double() * weight.scales).t()
    assert relative_error(out, exact + bias) < 2e-3


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    """Rows alone, in another place and among others are equal to the bit."""
    for shape in SHAPES if device == "cpu" else SHAPES + LARGE:
        for dtype in dtypes(device):
            x = randn(130, shape[1], device=device, dtype=dtype)
            weight = randn(*shape, device=device, dtype=dtype)
            whole = linear(x, weight)
            for start, end in PLACES:
                assert torch.equal(linear(x[start:end], weight), whole[start:end])
        if shape[0] % 16 or shape[1] % 16:
            continue
        rows, matrix = quantise(x), quantise(weight)
        arguments = (matrix.values, matrix.scales[:, 0].contiguous(), None, torch.float16)
        whole = scaled_linear(rows, *arguments)
        for start, end in PLACES:
            part = scaled_linear(rows_of(rows, slice(start, end)), *arguments)
            assert torch.equal(part, whole[start:end])
