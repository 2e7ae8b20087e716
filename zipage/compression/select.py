"""Which tokens survive: exact top-k per layer and KV head, with deterministic ties."""

from __future__ import annotations

import torch

_SIGN = -(1 << 31)
_INF = 0x7F800000


def _order_key(scores: torch.Tensor) -> torch.Tensor:
    """An int32 in the order of the fp32 score: NaN counts as -inf, -0 as 0.

    Integers, because comparisons of floats depend on whether the thread flushes denormals.
    """
    bits = scores.contiguous().view(torch.int32)
    bits = torch.where((bits & ~_SIGN) > _INF, _SIGN | _INF, bits)
    bits = torch.where(bits == _SIGN, 0, bits)
    return torch.where(bits < 0, bits ^ ~_SIGN, bits)


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
    ranked = _order_key(scores)
    if protect_below > 0:
        ranked = ranked.masked_fill(positions < protect_below, _INF)
    ranked[..., ranked.shape[-1] - window :] = _INF
    # A stable descending sort of the reversed slots puts the newer of two equals first.
    order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    kept = torch.zeros_like(scores, dtype=torch.bool)
    return kept.scatter_(-1, order, True).flip(-1)
