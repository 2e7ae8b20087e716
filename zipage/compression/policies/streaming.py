"""Attention sinks and recent tokens (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zipage.compression.policies.base import Count, Policy, PolicyScores
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class StreamingPolicy(Policy):
    """Keep the first tokens of the text and the newest ones.

    Attributes:
        num_sinks: first text positions that are kept.
    """

    name: ClassVar[str] = "streaming"

    num_sinks: Count = 4

    def scores(self, view: CacheView) -> PolicyScores:
        """Score by text position (exact in fp32 up to 2^24)."""
        newness = view.positions.float()
        return PolicyScores(newness.masked_fill(view.positions < self.num_sinks, float("inf")))
