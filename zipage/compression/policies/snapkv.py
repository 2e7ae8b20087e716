"""SnapKV: pooled attention of the observation window (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zipage.compression.policies.base import Kernel, Policy, PolicyScores
from zipage.compression.scores import Reduction
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class SnapKVPolicy(Policy):
    """Window attention, max-pooled over neighbouring tokens at every compression.

    Attributes:
        group: reduction of attention over the query heads of a KV head, done first.
        window_reduction: reduction over the window.
        pooling: kernel of the pooling; 1 is none.
    """

    name: ClassVar[str] = "snapkv"

    group: Reduction = "mean"
    window_reduction: Reduction = "mean"
    pooling: Kernel = 5

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token; the unpooled attention is stored."""
        attention = view.attention(self.group, self.window_reduction)
        pooled = view.max_pool(attention, self.pooling) if self.pooling > 1 else attention
        return PolicyScores(pooled, attention)
