"""Products of few rows with a weight matrix, in parts that the next kernel sums.

A decode step's products are bound by reading the weights. A narrow matrix has too few tiles for
all multiprocessors, so its columns are split too; the parts of the sum, in fp32, are added by the
norm that reads the result anyway, which saves a launch and a rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zipage.models.fp8 import FP8, Fp8Rows

# Products with more rows are left to the library.
_MOST_ROWS = 128
# With at most this many rows in two bytes, two programs fit a multiprocessor's shared memory.
_FEW_ROWS = 64
# With more rows, the share of multiprocessors to keep busy; below it the library is faster.
_BUSY = 0.85
# Rows of the weight a program multiplies at once, and bytes of each.
_COLUMNS = 64
_STEP_BYTES = 256
_SPLITS = (1, 2, 4, 8)


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x,  # [rows, K]
    weight,  # [N, K]
    parts,  # [SPLITS, rows, N]
    x_scales,  # [rows] of fp8
    weight_scales,  # [N] of fp8
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SCALED: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    # Tensor cores sum fp8 products with few bits, so their sums must be no longer than this.
    IMPRECISE: tl.constexpr = 128 if SCALED else 0
    width: tl.constexpr = K // SPLITS
    k = split * width + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    exists = row < rows
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    weights = weight + column[:, None].to(tl.int64) * K + k[None, :]
    inputs = x + row[:, None] * K + k[None, :]
    for _ in range(0, width, STEP):
        # The weights are the left operand, of which tensor cores need many rows.
        a = tl.load(weights)
        b = tl.trans(tl.load(inputs, mask=exists[:, None], other=0.0))
        total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
        weights += STEP
        inputs += STEP
    if SCALED:
        total *= tl.load(weight_scales + column)[:, None]
        total *= tl.load(x_scales + row, mask=exists, other=0.0)[None, :]
    target = parts + (split * rows + row[None, :]) * N + column[:, None]
    tl.store(target, total.to(parts.dtype.element_ty), mask=exists[None, :])


@dataclass(frozen=True)
class SkinnyPlan:
    """How a product is split.

    Attributes:
        splits: parts of the sum.
        step: columns multiplied at once.
        stages: steps in flight.
    """

    splits: int
    step: int
    stages: int


def plan_skinny(rows: int, weight: torch.Tensor, processors: int, memory: int) -> SkinnyPlan | None:
    """How to split the product of `rows` rows with a weight; None if this kernel is unsuitable.

    For few rows in two bytes, one and a half programs per multiprocessor hide most of a program's
    start and end. For more rows, and in fp8, which is read fast, one program with a deep pipeline
    is better than more parts.

    Args:
        rows: rows of the other factor.
        weight: ``[N, K]`` in fp8 or a 2-byte dtype, contiguous.
        processors: multiprocessors of the device.
        memory: bytes of shared memory a program may use. If it is small, fewer steps are in
            flight.
    """
    n, k = weight.shape
    fp8 = weight.dtype == FP8
    if (not fp8 and weight.dtype.itemsize != 2) or rows > _MOST_ROWS or n % _COLUMNS:
        return None
    tiles, step = n // _COLUMNS, _STEP_BYTES // weight.dtype.itemsize
    deepest = memory // (_STEP_BYTES * (_COLUMNS + _padded(rows)))
    if deepest < 2:
        return None
    if fp8 and tiles > processors:
        # Several programs share a multiprocessor's memory.
        return SkinnyPlan(1, step // 2, 3) if k % (step // 2) == 0 else None
    splits = [s for s in _SPLITS if k % (s * step) == 0]
    if not splits:
        return None
    if not fp8 and rows <= _FEW_ROWS:
        enough = [s for s in splits if 2 * tiles * s >= 3 * processors]
        stages = min(3 if rows > 32 else 4, deepest)
        return SkinnyPlan(enough[0] if enough else splits[-1], step, stages)
    most = max(s for s in splits if s == splits[0] or tiles * s <= processors)
    if not fp8 and not (deepest >= 4 and _BUSY * processors <= tiles * most <= processors):
        return None
    return SkinnyPlan(most, step, min(4, deepest))


def _padded(rows: int) -> int:
    padded: int = max(16, triton.next_power_of_2(rows))
    return padded


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, plan: SkinnyPlan) -> torch.Tensor:
    """The parts of ``x @ weight.T``.

    Args:
        x: ``[R, K]`` in a 2-byte dtype, contiguous.
        weight: ``[N, K]``, contiguous.
        plan: from `plan_skinny`.

    Returns:
        ``[splits, R, N]`` fp32, whose sum over the first dimension is the product.
    """
    return _launch(x, weight, None, None, plan, torch.float32)


def scaled_skinny_linear(
    x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, plan: SkinnyPlan, dtype: torch.dtype
) -> torch.Tensor:
    """The parts of `zipage.models.fp8.scaled_product` without a bias.

    Args:
        x: ``[R, K]``.
        weight: ``[N, K]`` fp8, contiguous.
        scale: ``[N]`` fp32.
        plan: from `plan_skinny`.
        dtype: dtype of the parts.

    Returns:
        ``[splits, R, N]``, whose sum over the first dimension is the product.
    """
    return _launch(x.values, weight, x.scales, scale, plan, dtype)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    plan: SkinnyPlan,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, (n, k) = len(x), weight.shape
    parts = torch.empty(plan.splits, rows, n, dtype=dtype, device=x.device)
    _skinny_kernel[(n // _COLUMNS, plan.splits)](
        x,
        weight,
        parts,
        x if x_scales is None else x_scales,
        weight if weight_scales is None else weight_scales,
        rows,
        N=n,
        K=k,
        SPLITS=plan.splits,
        ROWS=_padded(rows),
        COLUMNS=_COLUMNS,
        STEP=plan.step,
        SCALED=x_scales is not None,
        num_warps=4,
        num_stages=plan.stages,
    )
    return parts
