"""Which tokens survive: exact top-k per layer and KV head, with deterministic ties."""

from __future__ import annotations

import torch


def select_tokens(
    scores: torch.Tensor,
    positions: torch.Tensor,
    keep: int,
    window: int,
    protect_below: int,
) -> torch.Tensor:
    """Mark the tokens to keep.

    Equal scores: the newer slot wins. NaN counts as -inf. No host synchronisation.

    Args:
        scores: ``[L, H, T]`` fp32, larger is kept.
        positions: ``[L, H, T]`` text positions.
        keep: tokens kept per layer and head.
        window: the last `window` slots are kept whatever their scores.
        protect_below: so are the tokens at text positions below this, as far as they fit.

    Returns:
        ``[L, H, T]`` bool, exactly `keep` True per layer and head.
    """
    inf = float("inf")
    ranked = torch.where(scores.isnan(), -inf, scores)
    if protect_below > 0:
        ranked = ranked.masked_fill(positions < protect_below, inf)
    ranked[..., ranked.shape[-1] - window :] = inf
    # A stable descending sort of the reversed slots puts the newer of two equals first.
    order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    kept = torch.zeros_like(scores, dtype=torch.bool)
    return kept.scatter_(-1, order, True).flip(-1)
