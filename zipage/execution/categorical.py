"""One draw from the softmax distribution of each row, whole or cut by min-p, top-k and top-p.

R rows, V token ids, K most likely candidates. A draw inverts the cumulative distribution in the
order of token ids with one uniform number per row. Sums are fp64, so that neither the size of the
vocabulary nor the other rows of the batch show in the result, and whole and cut rows agree.
"""

from __future__ import annotations

import torch

_BLOCK = 256
_FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 16


def draw_rows(
    logits: torch.Tensor, peaks: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Draws for some rows, each like `draw` or `draw_filtered`.

    Args:
        logits: ``[R, V]``.
        peaks: ``[Q]``, maximum of each draw's row, at the index given in `table`.
        table: ``[D, 7]`` float64, a line per draw: row of `logits`, index into `peaks` and `out`,
            1 / temperature, uniform number, log(min_p) or -inf, top_k or V, top_p.
        out: ``[Q]`` int64, receives the token ids; 0 where the maximum is not finite.
    """
    sources, into = table[:, 0].long(), table[:, 1].long()
    top_k, top_p = table[:, 5].long(), table[:, 6]
    usable = peaks[into].isfinite()
    cut = (top_p < 1.0) | (top_k < logits.shape[1]) | ~table[:, 4].isneginf()
    out.index_fill_(0, into, 0)
    for filtered in (False, True):
        part = (usable & (cut == filtered)).nonzero().squeeze(1)
        if not len(part):
            continue
        rows = sources[part]
        whole = len(rows) == len(logits) and bool((rows.diff() == 1).all())
        source = (logits if whole else logits[rows]).float()
        numbers = table[part].unbind(1)
        options = (source, peaks[into[part]].float(), numbers[2].float(), numbers[3])
        if filtered:
            drawn = draw_filtered(*options, numbers[4].float(), top_k[part], top_p[part])
        else:
            drawn = draw(*options)
        out.index_copy_(0, into[part], drawn)


def draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    inverse_temperatures: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draws from ``softmax(logits / temperature)``.

    Args:
        logits: ``[R, V]`` float32 without NaN or +inf.
        peaks: ``[R]`` float32, the finite maximum of each row.
        inverse_temperatures: ``[R]`` float32.
        uniforms: ``[R]`` float64 in [0, 1).

    Returns:
        ``[R]`` int64 token ids, never one whose logit is -inf.
    """
    weights = _scaled(logits, peaks, inverse_temperatures).exp_()
    num_rows, vocab_size = weights.shape
    whole = vocab_size // _BLOCK
    sums = weights[:, : whole * _BLOCK].view(num_rows, whole, _BLOCK).sum(-1, dtype=torch.float64)
    if vocab_size % _BLOCK:
        rest = weights[:, whole * _BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat((sums, rest), dim=1)
    ends = sums.cumsum(-1)
    targets = uniforms.unsqueeze(1) * ends[:, -1:]
    block = _invert(ends, targets)
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    targets = targets - starts.gather(1, block)
    token_ids = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = weights.gather(1, token_ids.clamp(max=vocab_size - 1)).double()
    inside = inside.masked_fill(token_ids >= vocab_size, 0.0)
    return token_ids.gather(1, _invert(inside.cumsum(-1), targets)).squeeze(1)


def draw_filtered(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    inverse_temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Draws from ``softmax(logits / temperature)`` cut by min-p, then top-k, then top-p.

    Each filter sees what the previous one left, renormalised. Tokens tied with the last one kept
    are kept too, so that the result does not depend on the order of equal logits.

    Args:
        logits, peaks, inverse_temperatures, uniforms: as for `draw`.
        log_min_p: ``[R]`` float32, natural logarithm of min_p, -inf for none.
        top_k: ``[R]`` int64 from 1; V or more for none.
        top_p: ``[R]`` float64 in (0, 1]; 1 for none.

    Returns:
        ``[R]`` int64 token ids.
    """
    vocab_size = logits.shape[1]
    top_k = top_k.clamp(max=vocab_size)
    uncut = log_min_p.isneginf() & (top_k == vocab_size)
    totals = torch.ones_like(uniforms)
    if bool(uncut.any()):
        # The mass of tokens that are not candidates only matters where top-p is the only filter.
        rows = uncut.nonzero().squeeze(1)
        part = logits if len(rows) == len(logits) else logits[rows]
        scaled = _scaled(part, peaks[rows], inverse_temperatures[rows])
        totals[rows] = scaled.exp_().sum(-1, dtype=torch.float64)
    limits = top_k.masked_fill(top_k == vocab_size, 0)
    num_candidates = min(max(_FIRST_CANDIDATES, int(limits.max()) + 1), vocab_size)
    token_ids = torch.zeros_like(top_k)
    rows = torch.arange(len(logits), device=logits.device)
    while True:
        part = logits if len(rows) == len(logits) else logits[rows]
        drawn, resolved = _draw_candidates(
            part,
            peaks[rows],
            inverse_temperatures[rows],
            uniforms[rows],
            log_min_p[rows],
            top_k[rows],
            top_p[rows],
            totals[rows],
            num_candidates,
        )
        token_ids[rows] = drawn
        rows = rows[~resolved]
        if not len(rows):
            return token_ids
        num_candidates = min(num_candidates * _MORE_CANDIDATES, vocab_size)


def _draw_candidates(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    inverse_temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    totals: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the K most likely tokens; also returns for which rows that was exact."""
    vocab_size = logits.shape[1]
    values, token_ids = logits.topk(num_candidates, dim=-1)
    values = _scaled(values, peaks, inverse_temperatures)
    last = values[:, -1]
    unlimited = top_k == vocab_size
    kth = values.gather(1, (top_k.clamp(max=num_candidates) - 1).unsqueeze(1)).squeeze(1)
    floor = log_min_p.maximum(kth.masked_fill(unlimited, -torch.inf))
    weights = values.double().exp().masked_fill(values < floor.unsqueeze(1), 0.0)
    ends = weights.cumsum(-1)
    # The floor is also -inf where fewer than top_k tokens are possible: all are candidates then.
    totals = torch.where(unlimited & log_min_p.isneginf(), totals, ends[:, -1])
    needed = (ends - weights < (top_p * totals).unsqueeze(1)) & (weights > 0)
    nucleus = values.gather(1, needed.sum(-1, keepdim=True) - 1).squeeze(1)
    cut = torch.where(top_p < 1.0, nucleus, floor)
    resolved = (last < cut) & (floor.isneginf() | (last < floor))
    if num_candidates == vocab_size:
        resolved = torch.ones_like(resolved)
    weights = weights.masked_fill(values < cut.unsqueeze(1), 0.0)
    order = token_ids.argsort(-1)
    ends = weights.gather(1, order).cumsum(-1)
    position = _invert(ends, uniforms.unsqueeze(1) * ends[:, -1:])
    return token_ids.gather(1, order.gather(1, position)).squeeze(1), resolved


def _scaled(
    logits: torch.Tensor, peaks: torch.Tensor, inverse_temperatures: torch.Tensor
) -> torch.Tensor:
    """Logits over temperature, their maximum moved to 0 first so that nothing overflows."""
    return (logits - peaks.unsqueeze(1)).mul_(inverse_temperatures.unsqueeze(1))


def _invert(ends: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """First index of each row of `ends` that exceeds its target: ``[R, N], [R, 1] -> [R, 1]``.

    Rounding may push a target to the end of the row; then it is the last entry with any weight.
    """
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.searchsorted(ends, targets, right=True).minimum(last)
