"""R-KV: attention against redundancy over the whole cache (arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from zipage.compression.policies.base import Fraction, Kernel, Policy, PolicyScores, Positive
from zipage.compression.scores import Reduction
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class RKVPolicy(Policy):
    """``z = λ·a - (1 - λ)·r`` with raw redundancy and no memory of earlier scores.

    Compares all pairs of keys: O(T²·D) per layer and head.

    Attributes:
        group: reduction of attention over the query heads of a KV head, done first.
        window_reduction: reduction over the window.
        pooling: kernel of max-pooling ``a`` over neighbouring tokens; 1 is none.
        lam: λ, weight of attention against redundancy.
        tau: τ, temperature of the redundancy's softmax.
        threshold: similarity above which the newest of a set of near-duplicates is spared.
    """

    name: ClassVar[str] = "rkv"

    group: Reduction = "max"
    window_reduction: Reduction = "mean"
    pooling: Kernel = 1
    lam: Fraction = 0.1
    tau: Positive = 0.4
    threshold: Fraction = 0.5

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token; the attention is stored."""
        attention = view.attention(self.group, self.window_reduction)
        pooled = view.max_pool(attention, self.pooling) if self.pooling > 1 else attention
        redundancy = view.redundancy(False, self.tau, self.threshold)
        return PolicyScores(torch.sub(pooled * self.lam, redundancy, alpha=1 - self.lam), attention)
