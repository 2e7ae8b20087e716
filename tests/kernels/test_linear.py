"""Packed linear layers against float64 products, and their independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.attention.paged import relative_error
from zipage.kernels import native
from zipage.kernels.native.linear import PackedLinear

pytestmark = pytest.mark.skipif(
    not native.available(), reason="no C compiler: native kernels cannot be built"
)

# Panels that are full, partly full and narrower than a vector; depths of one pass and of several.
SHAPES = [(768, 256), (320, 64), (37, 50), (3, 1500), (64, 2100), (1, 1)]


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 67, 300])
def test_products(rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(rows, shape[1])
    product = x.double() @ weight.double().T
    assert relative_error(PackedLinear(weight)(x), product) < 1e-5
    biased = PackedLinear(weight, bias)
    assert relative_error(biased(x), product + bias) < 1e-5
    y = torch.randn(rows, shape[0])
    expected = y + product + bias
    biased.add_to(y, x)
    assert relative_error(y, expected) < 1e-5


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_rows_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    linear = PackedLinear(torch.randn(shape), torch.randn(shape[0]))
    x, y = torch.randn(205, shape[1]), torch.randn(205, shape[0])
    product, added = linear(x), y.clone()
    linear.add_to(added, x)
    for threads, first, last in ((1, 0, 1), (2, 3, 8), (4, 100, 205), (1, 0, 205)):
        torch.set_num_threads(threads)
        part = y[first:last].clone()
        linear.add_to(part, x[first:last])
        assert torch.equal(linear(x[first:last]), product[first:last])
        assert torch.equal(part, added[first:last])


def test_weights_are_copied() -> None:
    weight = torch.randn(40, 30)
    linear, x = PackedLinear(weight), torch.randn(4, 30)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_a_transposed_weight_is_read_as_it_is_indexed() -> None:
    weight, x = torch.randn(30, 40), torch.randn(4, 30)
    assert torch.equal(PackedLinear(weight.T)(x), PackedLinear(weight.T.contiguous())(x))


def test_wrong_inputs_are_refused() -> None:
    linear = PackedLinear(torch.randn(40, 30))
    with pytest.raises(ValueError, match=r"\[rows, 30\]"):
        linear(torch.randn(4, 31))
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.randn(30, 4).T)
    with pytest.raises(ValueError, match="40 columns"):
        linear.add_to(torch.randn(3, 40), torch.randn(4, 30))
    with pytest.raises(ValueError, match="bfloat16"):
        PackedLinear(torch.randn(4, 4, dtype=torch.bfloat16))


def test_sums_round_no_worse_than_torch() -> None:
    """Long sums, and a residual far larger than the products added to it."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 1536, generator=generator) * 0.05
    x = torch.randn(40, 1536, generator=generator)
    y = torch.randn(40, 64, generator=generator) * 300
    exact = x.double() @ weight.double().T
    packed = PackedLinear(weight)

    def rms(error: torch.Tensor) -> float:
        return error.pow(2).mean().sqrt().item()

    assert rms(packed(x) - exact) <= 1.5 * rms(torch.nn.functional.linear(x, weight) - exact)
    total = y.clone()
    packed.add_to(total, x)
    theirs = y + torch.nn.functional.linear(x, weight)
    assert rms(total - (y.double() + exact)) <= 1.1 * rms(theirs - (y.double() + exact))
