"""The formulas of the scores and of selection as plain loops in float64."""

from __future__ import annotations

import math

import torch


def attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, group: str, window: str
) -> torch.Tensor:
    """``[L, w, Q, D]``, ``[L, H, T, D]`` -> ``[L, H, T]``."""
    layers, w, heads, _ = queries.shape
    kv_heads, length = keys.shape[1:3]
    per_group = heads // kv_heads
    reduce = {"max": max, "mean": lambda values: sum(values) / len(values)}
    out = torch.zeros(layers, kv_heads, length, dtype=torch.float64)
    for layer in range(layers):
        for head in range(kv_heads):
            k = keys[layer, head].double()
            rows = []  # [w][group][T]
            for i in range(w):
                visible = length - w + i + 1
                of_group = []
                for g in range(per_group):
                    q = queries[layer, i, head * per_group + g].double()
                    logits = [scale * float(q @ k[t]) for t in range(visible)]
                    peak = max(logits)
                    weights = [math.exp(x - peak) for x in logits]
                    total = sum(weights)
                    of_group.append([x / total for x in weights] + [0.0] * (length - visible))
                rows.append(of_group)
            for t in range(length):
                out[layer, head, t] = reduce[window](
                    [reduce[group]([weights[t] for weights in of_group]) for of_group in rows]
                )
    return out


def redundancy(
    keys: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    local: bool,
    tau: float,
    threshold: float,
) -> torch.Tensor:
    """``[L, H, T, D]``, ``[L, H, T]`` -> ``[L, H, T]``."""
    layers, kv_heads, length, _ = keys.shape
    out = torch.zeros(layers, kv_heads, length, dtype=torch.float64)
    for layer in range(layers):
        for head in range(kv_heads):
            k = keys[layer, head].double()
            unit = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            position = positions[layer, head].tolist()
            means = []
            step = block_size if local else length
            for first in range(0, length, step):
                slots = range(first, min(first + step, length))
                s = {
                    (i, j): 0.0 if i == j else float(unit[i] @ unit[j])
                    for i in slots
                    for j in slots
                }
                for j in slots:
                    similar = [i for i in slots if s[i, j] > threshold]
                    if similar:
                        s[max(similar, key=lambda i: position[i]), j] = 0.0
                means += [sum(s[i, j] for j in slots) / len(slots) for i in slots]
            weights = [math.exp((x - max(means)) / tau) for x in means]
            out[layer, head] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return out


def max_pool(scores: list[float], kernel: int) -> list[float]:
    reach = kernel // 2
    return [max(scores[max(0, t - reach) : t + reach + 1]) for t in range(len(scores))]


def select(
    scores: list[float], positions: list[int], keep: int, window: int, protect_below: int
) -> list[int]:
    """Slots kept, ascending."""

    def rank(slot: int) -> tuple[float, int]:
        score = -math.inf if math.isnan(scores[slot]) else scores[slot]
        if slot >= len(scores) - window or positions[slot] < protect_below:
            score = math.inf
        return (score, slot)

    return sorted(sorted(range(len(scores)), key=rank, reverse=True)[:keep])
