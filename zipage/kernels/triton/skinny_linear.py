"""Products of few rows with a weight matrix, in parts that the kernel after them sums.

A decode step's products are bound by reading the weights. A narrow matrix has too few tiles for
all multiprocessors, so its columns are split too; the parts of the sum, in fp32, are added by the
kernel that reads the result anyway (`add_rms_norm`), which saves a launch and a rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# More rows are left to the library, which is faster then.
_MOST_ROWS = 64
# Rows of the weight and columns a program multiplies at once.
_COLUMNS = 64
_STEP = 128
_MOST_SPLITS = 8


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x,  # [rows, K]
    weight,  # [N, K]
    parts,  # [SPLITS, rows, N] fp32
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    width: tl.constexpr = K // SPLITS
    k = split * width + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    exists = (row < rows)[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    weights = weight + column[:, None].to(tl.int64) * K + k[None, :]
    inputs = x + row[:, None] * K + k[None, :]
    for _ in range(0, width, STEP):
        # The weights are the left operand: its rows must be many for the matrix units.
        total = tl.dot(tl.load(weights), tl.trans(tl.load(inputs, mask=exists, other=0.0)), total)
        weights += STEP
        inputs += STEP
    target = parts + (split * rows + row[None, :]) * N + column[:, None]
    tl.store(target, total, mask=(row < rows)[None, :])


def num_splits(rows: int, weight: torch.Tensor, programs: int) -> int | None:
    """How many parts the columns of a product are split into; None if it is not for this kernel.

    Args:
        rows: rows of the other factor.
        weight: ``[N, K]``, contiguous.
        programs: how many the device should have at least.
    """
    n, k = weight.shape
    if weight.dtype.itemsize != 2 or rows > _MOST_ROWS or n % _COLUMNS:
        return None
    fitting = [s for s in (1, 2, 4, _MOST_SPLITS) if k % (s * _STEP) == 0]
    enough = [s for s in fitting if n // _COLUMNS * s >= programs]
    if enough or not fitting:
        return enough[0] if enough else None
    return fitting[-1]


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """The parts of ``x @ weight.T``.

    Args:
        x: ``[R, K]`` in a 2-byte dtype, contiguous, R at most 64.
        weight: ``[N, K]``, contiguous.
        splits: from `num_splits`.

    Returns:
        ``[splits, R, N]`` fp32, whose sum over the first dimension is the product.
    """
    rows, (n, k) = len(x), weight.shape
    parts = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    padded = max(16, triton.next_power_of_2(rows))
    _skinny_kernel[(n // _COLUMNS, splits)](
        x,
        weight,
        parts,
        rows,
        N=n,
        K=k,
        SPLITS=splits,
        ROWS=padded,
        COLUMNS=_COLUMNS,
        STEP=_STEP,
        num_warps=4,
        # Two programs fit the shared memory of a multiprocessor.
        num_stages=3 if padded == 64 else 4,
    )
    return parts
