"""Random eviction: the floor any policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from zipage.compression.policies.base import Policy, PolicyScores
from zipage.compression.view import CacheView

_MASK = (1 << 32) - 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit integers held in int64 (the finaliser of MurmurHash3)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Scores drawn by hashing (seed, tokens so far, layer, KV head, position).

    A hash instead of a generator: the draw depends on no other request, on no device and not on
    the order of the slots.
    """

    name: ClassVar[str] = "random"

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token uniformly in [0, 1)."""
        lists = torch.arange(view.num_layers * view.num_kv_heads, device=view.device)
        lists += view.first_layer * view.num_kv_heads
        stream = _mix(_mix((lists + view.num_tokens * 0x9E3779B1) & _MASK) ^ (view.seed & _MASK))
        stream = stream.view(view.num_layers, view.num_kv_heads, 1)
        drawn = _mix((stream + view.positions.long() * 0x9E3779B1) & _MASK)
        return PolicyScores((drawn >> 8).float() / (1 << 24))
