"""Packing the tokens that survive a compression into the target blocks, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zipage.cache.kv_cache import KVCache
from zipage.execution.transfer import to_device


def block_indices(
    blocks: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Block ids as a tensor on `device`, without waiting for the device."""
    return to_device(torch.tensor(blocks, dtype=dtype), device)


def plan_stable(kept: torch.Tensor, keep: int) -> torch.Tensor:
    """Survivors in slot order.

    Args:
        kept: ``[L, H, T]`` bool with exactly `keep` True per layer and head.
        keep: number of survivors.

    Returns:
        ``[L, H, keep]`` int64, the source slot of each target slot.
    """
    return (~kept).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :keep]


def plan_holes(kept: torch.Tensor, keep: int) -> torch.Tensor:
    """Survivors in the first `keep` slots stay; the others fill the holes there, in slot order.

    Moves at most as many tokens as lie beyond those slots.

    Args:
        kept: ``[L, H, T]`` bool with exactly `keep` True per layer and head.
        keep: number of survivors.

    Returns:
        ``[L, H, keep]`` int64, the source slot of each target slot.
    """
    stays = kept[..., :keep]
    own = torch.arange(keep, device=kept.device)
    movers = keep + (~kept[..., keep:]).to(torch.uint8).sort(dim=-1, stable=True).indices
    hole_rank = ((~stays).cumsum(-1) - 1).clamp(min=0, max=movers.shape[-1] - 1)
    return torch.where(stays, own, movers.gather(-1, hole_rank))


def move_tokens(
    cache: KVCache,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    slots: torch.Tensor,
    positions: torch.Tensor,
    stored: torch.Tensor | None,
) -> None:
    """Fill the target blocks. Source blocks that are not targets are only read.

    Args:
        cache: the KV pool.
        source_blocks: blocks in slot order.
        target_blocks: blocks to write; each replaces the source block at its index.
        slots: ``[L, H, keep]`` int64, the source slot of each target slot.
        positions: ``[L, H, T]`` int32 text positions of the source slots.
        stored: ``[L, H, T]`` fp32 scores to store with the tokens; None for 0.
    """
    layers, kv_heads, keep = slots.shape
    b = cache.spec.block_size
    source = block_indices(source_blocks, slots.device)
    target = block_indices(target_blocks, slots.device)

    def scatter_state(into: torch.Tensor, values: torch.Tensor) -> None:
        moved = values.gather(-1, slots).view(layers, kv_heads, keep // b, b)
        into.index_copy_(1, target, moved.transpose(1, 2).to(into.dtype))

    scatter_state(cache.positions, positions)
    scatter_state(cache.scores, torch.zeros_like(positions) if stored is None else stored)

    for layer in range(layers):
        tokens = cache.kv_bits[layer].index_select(0, source)  # [n, 2, H, b, D], a copy
        tokens = tokens.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, H, n * b, D]
        index = slots[layer, None, :, :, None].expand(2, -1, -1, tokens.shape[-1])
        moved = tokens.gather(2, index).view(2, kv_heads, keep // b, b, -1)
        cache.kv_bits[layer].index_copy_(0, target, moved.permute(2, 0, 1, 3, 4))
