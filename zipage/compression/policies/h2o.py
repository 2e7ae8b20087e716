"""Accumulated attention, in the manner of H2O (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zipage.compression.policies.base import Policy, PolicyScores
from zipage.compression.scores import Reduction
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class H2OPolicy(Policy):
    """The attention a token received, summed over all compressions so far.

    H2O sums over every query; here only the queries of each compression's window are seen.

    Attributes:
        group: reduction of attention over the query heads of a KV head, done first.
        window_reduction: reduction over the window.
    """

    name: ClassVar[str] = "h2o"

    group: Reduction = "mean"
    window_reduction: Reduction = "mean"

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token; the sum is stored."""
        attention = view.attention(self.group, self.window_reduction)
        total = attention if view.first else attention + view.stored_scores
        return PolicyScores(total, total)
