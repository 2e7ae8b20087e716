"""Eviction of whole blocks, the granularity of engines without token-wise eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zipage.compression.policies.base import Policy, PolicyScores
from zipage.compression.scores import Reduction
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class BlockPolicy(Policy):
    """Every token scores the mean window attention of its block.

    Attributes:
        group: reduction of attention over the query heads of a KV head, done first.
        window_reduction: reduction over the window.
    """

    name: ClassVar[str] = "block"

    group: Reduction = "max"
    window_reduction: Reduction = "mean"

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token; nothing is stored."""
        return PolicyScores(view.block_mean(view.attention(self.group, self.window_reduction)))
