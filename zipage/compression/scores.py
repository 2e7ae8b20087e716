"""Token scores in torch: the reference for the native and Triton kernels, on any device.

Letters: L layers, H KV heads, Q query heads, w window, T cached tokens, D head dim, b block size.
All results are fp32 whatever the dtype of the cache (bf16 scores of thousands of tokens take only
hundreds of distinct values, and ties would then decide evictions).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Reduction = Literal["max", "mean"]

# Largest intermediate tensor, in elements; work is split by layers, heads or columns to stay below.
_CHUNK_ELEMENTS = 1 << 25
#: Smaller norms are raised to this, so that zero keys give similarity 0 instead of NaN.
NORM_EPS = 1e-12


def _reduce(x: torch.Tensor, dim: int, how: Reduction) -> torch.Tensor:
    return x.amax(dim) if how == "max" else x.mean(dim)


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    group: Reduction = "max",
    window: Reduction = "mean",
) -> torch.Tensor:
    """Attention the last `w` tokens pay to each cached token.

    ``A = softmax_T(Q_w K^T * scale)``, causal inside the window (query i sits in slot T - w + i);
    then reduced over the query heads of a KV head, then over the window.

    Args:
        queries: ``[L, w, Q, D]``.
        keys: ``[L, H, T, D]``; the last w slots are the window.
        scale: factor of the logits, usually ``1/sqrt(D)``.
        group: reduction over the query heads of a KV head.
        window: reduction over the window.

    Returns:
        ``[L, H, T]`` fp32.
    """
    layers, w, heads, dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    slots = torch.arange(length, device=keys.device)
    future = slots > slots[length - w :, None]
    rows = max(1, _CHUNK_ELEMENTS // (heads * w * length))
    out = []
    for first in range(0, layers, rows):
        q = queries[first : first + rows].float()
        q = q.view(-1, w, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        k = keys[first : first + rows].float().unsqueeze(2)
        logits = (q @ k.transpose(-1, -2)) * scale
        weights = logits.masked_fill_(future, float("-inf")).softmax(-1)
        out.append(_reduce(_reduce(weights, 2, group), 2, window))
    return torch.cat(out)


def redundancy(
    keys: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    local: bool,
    tau: float,
    threshold: float,
) -> torch.Tensor:
    """How much a key resembles the others (R-KV, arXiv 2505.24133; lightning: arXiv 2603.08743).

    With normalised keys ``S = K̂ K̂^T``, zero diagonal; in each column the row newest by text
    position with ``S > threshold`` is zeroed too; ``r = softmax_T(rowmean(S) / tau)``.
    With `local`, S has the similarities inside each block only and the mean is over the tokens
    of the block.

    Args:
        keys: ``[L, H, T, D]``.
        positions: ``[L, H, T]`` text positions, distinct within a layer and head.
        block_size: b.
        local: lightning (inside blocks) instead of raw (over the whole cache).
        tau: temperature of the softmax.
        threshold: similarity above which the newest row of a column is spared; >= 0.

    Returns:
        ``[L, H, T]`` fp32, sums to 1 over T.
    """
    unit = F.normalize(keys.float(), dim=-1, eps=NORM_EPS)
    means = (
        _block_means(unit, positions, block_size, threshold)
        if local
        else _cache_means(unit, positions, threshold)
    )
    return (means / tau).softmax(-1)


def _sum_spared(
    similarity: torch.Tensor, positions: torch.Tensor, diagonal: int, threshold: float
) -> torch.Tensor:
    """Row sums of some columns of S, ``[..., rows, columns]``; column 0 is row `diagonal`'s."""
    rows, columns = similarity.shape[-2:]
    row = torch.arange(rows, device=similarity.device)[:, None]
    own = row == torch.arange(diagonal, diagonal + columns, device=similarity.device)
    similarity = similarity.masked_fill(own, 0.0)
    age = torch.where(similarity > threshold, positions.unsqueeze(-1), -1)
    newest = age.argmax(-2, keepdim=True)
    spared = (row == newest) & (similarity > threshold)
    return similarity.masked_fill(spared, 0.0).sum(-1)


def _block_means(
    unit: torch.Tensor, positions: torch.Tensor, block_size: int, threshold: float
) -> torch.Tensor:
    layers, kv_heads, length, dim = unit.shape
    blocks = -(-length // block_size)
    padding = blocks * block_size - length
    unit = F.pad(unit, (0, 0, 0, padding)).view(layers, kv_heads, blocks, block_size, dim)
    positions = F.pad(positions, (0, padding)).view(layers, kv_heads, blocks, block_size)
    rows = max(1, _CHUNK_ELEMENTS // (kv_heads * blocks * block_size**2))
    sums = []
    for first in range(0, layers, rows):
        u, p = unit[first : first + rows], positions[first : first + rows]
        sums.append(_sum_spared(u @ u.transpose(-1, -2), p, 0, threshold))
    count = torch.full((blocks, 1), float(block_size), dtype=torch.float32, device=unit.device)
    count[-1] -= padding
    return (torch.cat(sums) / count).flatten(2)[..., :length]


def _cache_means(unit: torch.Tensor, positions: torch.Tensor, threshold: float) -> torch.Tensor:
    layers, kv_heads, length, _ = unit.shape
    columns = max(1, _CHUNK_ELEMENTS // (kv_heads * length))
    means = torch.zeros(layers, kv_heads, length, dtype=torch.float32, device=unit.device)
    for layer in range(layers):
        u, p = unit[layer], positions[layer]
        for first in range(0, length, columns):
            part = u @ u[:, first : first + columns].transpose(-1, -2)
            means[layer] += _sum_spared(part, p, first, threshold)
    return means / length


def max_pool(scores: torch.Tensor, kernel: int) -> torch.Tensor:
    """Maximum over the `kernel` (odd) neighbours of each token along T, stride 1: ``[L, H, T]``."""
    return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
