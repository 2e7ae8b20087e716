"""Matrix products whose rows do not depend on their number: one tile shape, one order of sums.

Libraries choose tiles, and whether to split the sum, by the number of rows, so a row's last bits
depend on the batch. Here one program always sums an element of the result over K in steps of DEPTH.
The tile depends only on the weight's shape and dtype.

Letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from zipage.models.fp8 import FP8, Fp8Rows

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Row tiles multiplied in succession with the same tile of weights, which stays in the L2 cache.
_GROUP = 16
# With fewer outputs, tiles are narrower, or too few programs would read the weights.
_FEW_OUTPUTS = 8192


# The number of rows must not select among compiled variants.
@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    x_scales,  # [M, 1] fp32
    weight_scales,  # [N] fp32
    out,  # [M, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // (GROUP * column_tiles)
    members = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * column_tiles)
    row = ((group * GROUP + inside % members) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((inside // members) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    row_mask, column_mask = row < rows, column < N
    left = x + row[:, None] * K + depth[None, :]
    right = weight + column[:, None] * K + depth[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a = tl.load(left + start, mask=row_mask[:, None], other=0.0)
            b = tl.load(right + start, mask=column_mask[:, None], other=0.0)
        else:
            there = (depth < K - start)[None, :]
            a = tl.load(left + start, mask=row_mask[:, None] & there, other=0.0)
            b = tl.load(right + start, mask=column_mask[:, None] & there, other=0.0)
        if _INTERPRETED:  # the interpreter keeps bf16 and fp8 as raw bits, and would multiply those
            a, b = a.to(tl.float32), b.to(tl.float32)
        if SCALED:
            # Tensor cores sum fp8 products with few bits, so no sum may be longer than this.
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=DEPTH)
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if SCALED:
        total *= tl.load(x_scales + row, mask=row_mask, other=0.0)[:, None]
        total *= tl.load(weight_scales + column, mask=column_mask, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * N + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    if ADD:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.linear``, bitwise the same for a row whatever the other rows.

    Args:
        x: ``[M, K]``, any M.
        weight: ``[N, K]``, contiguous.
        bias: ``[N]`` or None.
        out: ``[M, N]``, contiguous, to be filled; a new tensor if None.
        add: add to the content of `out`, before rounding.

    Returns:
        ``[M, N]`` in the dtype of `x`.
    """
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return _launch(x, weight, bias, None, None, out, add)


def scaled_linear(
    x: Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`zipage.models.fp8.scaled_product`, bitwise the same for a row whatever the other rows."""
    out = torch.empty(len(x.values), len(weight), dtype=dtype, device=weight.device)
    return _launch(x.values, weight, bias, x.scales, scale, out, add=False)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    out: torch.Tensor,
    add: bool,
) -> torch.Tensor:
    outputs, inputs = weight.shape
    if not len(x):
        return out
    scaled = x.dtype == FP8
    # Products of fp32 run on CUDA cores, from registers.
    wide = x.dtype == torch.float32
    rows, depth = (32, 32) if wide else (64, 128)
    columns = 32 if wide or outputs < _FEW_OUTPUTS else 64
    grid = (triton.cdiv(len(x), rows) * triton.cdiv(outputs, columns),)
    _product_kernel[grid](
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out if x_scales is None else x_scales,
        out if weight_scales is None else weight_scales,
        out,
        len(x),
        N=outputs,
        K=inputs,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        GROUP=_GROUP,
        SCALED=scaled,
        BIAS=bias is not None,
        ADD=add,
        num_warps=4,
        num_stages=2 if wide else 4,
    )
    return out
