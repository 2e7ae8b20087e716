"""Rotary position embedding: parameters from config.json, and the cosine and sine tables.

RoPE is arXiv 2104.09864; `linear` is position interpolation (arXiv 2306.15595), `yarn` is
arXiv 2309.00071, `llama3` is the frequency scaling published with Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zipage.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """RoPE of one model.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the frequencies.
        factor: how many times longer the context is made (all types but ``default``).
        original_max_positions: context length of the pretraining (``llama3``, ``yarn``).
        low_freq_factor, high_freq_factor: bounds of the smoothed band (``llama3``).
        beta_fast, beta_slow: rotations that bound the ramp (``yarn``).
        truncate: round the ramp's bounds outward to whole dimensions (``yarn``).
        attention_factor: multiplies the cosines and sines (``yarn``; 1 otherwise).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def parse_rope_parameters(raw: Mapping[str, Any]) -> RopeParameters:
    """Read the RoPE part of a config.json.

    Accepts ``rope_theta`` with ``rope_scaling`` and the newer ``rope_parameters``.

    Args:
        raw: the whole config.json.

    Raises:
        ModelError: the type is unknown, a parameter is missing or out of range, or RoPE covers
            only a part of each head or differs between layers.
    """
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"rope parameters must be an object, got {found!r}")
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ModelError(f"rope parameters that differ between layers are not supported: {found}")
    scaling = {key: value for key, value in found.items() if value is not None}
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported, only 1")

    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope_type == "dynamic":
        raise ModelError(
            "rope type 'dynamic' is not supported: its frequencies change with the length of the "
            "text, so cached keys would have to be rotated again"
        )
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"unknown rope type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")

    def number(name: str, default: float | None = None) -> float:
        value = scaling.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(
                f"rope type {rope_type!r} needs {name} as a positive number, got {value!r}"
            )
        return float(value)

    if rope_type == "default":
        return RopeParameters(theta=float(theta))
    if rope_type == "linear":
        return RopeParameters("linear", float(theta), number("factor"))

    longest = raw.get("max_position_embeddings")
    original = int(
        raw.get("original_max_position_embeddings")
        or number("original_max_position_embeddings", longest)
    )
    if rope_type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ModelError(
                f"rope type 'llama3' needs high_freq_factor > low_freq_factor, got {high} and {low}"
            )
        return RopeParameters(
            "llama3",
            float(theta),
            number("factor"),
            original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    factor = number("factor", longest / original if longest else None)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        default_attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    else:
        default_attention = _yarn_mscale(factor, 1.0)
    return RopeParameters(
        "yarn",
        float(theta),
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=number("attention_factor", default_attention),
    )


def build_rope_tables(
    rope: RopeParameters, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosine and sine tables of one model.

    Args:
        rope: its parameters.
        head_dim: D, even; every dimension is rotated.
        max_positions: rows of the tables, positions 0 to `max_positions` - 1.
        device: where the tables live.

    Returns:
        cos, sin: ``[max_positions, D / 2]`` fp32, multiplied by the attention factor.
    """
    # On the CPU for every device, so that all devices use the same frequencies.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = rope.theta**exponents
    if rope.rope_type == "yarn":
        frequencies = _yarn_frequencies(rope, powers)
    elif rope.rope_type == "llama3":
        frequencies = _llama3_frequencies(rope, 1.0 / powers)
    else:
        frequencies = 1.0 / powers / rope.factor
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    scale = rope.attention_factor
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def _llama3_frequencies(rope: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend the band between."""
    wavelengths = 2 * math.pi / frequencies
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / span
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(smooth < 0, frequencies / rope.factor, blended)
    return torch.where(smooth > 1, frequencies, scaled)


def _yarn_frequencies(rope: RopeParameters, powers: torch.Tensor) -> torch.Tensor:
    """Ramp from extrapolated to interpolated frequencies (arXiv 2309.00071, section 3.2)."""
    half = powers.numel()
    head_dim = 2 * half

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature of arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
