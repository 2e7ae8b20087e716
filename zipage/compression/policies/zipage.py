"""Zipage: window attention, remembered scores and redundancy (arXiv 2603.08743, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from zipage.compression.policies.base import Fraction, Kernel, Policy, PolicyScores, Positive
from zipage.compression.scores import Reduction
from zipage.compression.view import CacheView


@dataclass(frozen=True)
class ZipagePolicy(Policy):
    """``z = λ·s - (1 - λ)·r`` with every part adjustable.

    ``a`` is the window's attention, weighted by the token's value norm; ``s = max(a, γ·s_old)``
    for tokens scored before and ``a`` for new ones; ``r`` the redundancy. Pooling replaces ``a``
    in ``z`` by its maximum over neighbouring tokens; what is stored is never pooled.

    The defaults did best on zipage-tiny (docs/compression.md); `ZipagePaperPolicy` has the
    published ones.

    Attributes:
        group: reduction of attention over the query heads of a KV head, done first.
        window_reduction: reduction over the window.
        value_power: p in ``a·(‖v‖ / mean ‖v‖)^p``: attention to a token whose value is small
            changes little (VATP, arXiv 2406.12335); 0 is none.
        first_pooling: kernel of the pooling at a request's first compression; 1 is none.
        later_pooling: kernel at later ones, where neighbours are the nearest cached tokens.
        gamma: γ, decay of remembered scores per compression; 0 forgets them.
        lam: λ, weight of attention against redundancy; at 1 redundancy is not computed.
        redundancy: ``"lightning"`` compares keys inside each block, ``"raw"`` over the cache.
        tau: τ, temperature of the redundancy's softmax.
        threshold: similarity above which the newest of a set of near-duplicates is spared.
    """

    name: ClassVar[str] = "zipage"
    default_window: ClassVar[int] = 24

    group: Reduction = "max"
    window_reduction: Reduction = "max"
    value_power: Fraction = 1.0
    first_pooling: Kernel = 1
    later_pooling: Kernel = 1
    gamma: Fraction = 0.0
    lam: Fraction = 0.7
    redundancy: Literal["lightning", "raw"] = "lightning"
    tau: Positive = 0.4
    threshold: Fraction = 0.5

    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token; the stored score is the unpooled ``s``."""
        attention = view.attention(self.group, self.window_reduction)
        if self.value_power:
            norms = view.value_norms()
            scale = norms.mean(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
            weight = norms.div_(scale)
            attention *= weight if self.value_power == 1 else weight.pow_(self.value_power)
        remembered = view.stored_scores * self.gamma if self.gamma and not view.first else None
        stored = attention if remembered is None else torch.maximum(attention, remembered)
        pooling = self.first_pooling if view.first else self.later_pooling
        final = stored
        if pooling > 1:
            final = view.max_pool(attention, pooling)
            if remembered is not None:
                final = torch.maximum(final, remembered)
        if self.lam < 1:
            redundancy = view.redundancy(self.redundancy == "lightning", self.tau, self.threshold)
            final = torch.sub(final * self.lam, redundancy, alpha=1 - self.lam)
        return PolicyScores(final, stored)


@dataclass(frozen=True)
class ZipagePaperPolicy(ZipagePolicy):
    """`ZipagePolicy` with the published defaults."""

    name: ClassVar[str] = "zipage-paper"
    default_window: ClassVar[int] = 16

    window_reduction: Reduction = "mean"
    value_power: Fraction = 0.0
    first_pooling: Kernel = 5
    gamma: Fraction = 0.8
    lam: Fraction = 0.2
