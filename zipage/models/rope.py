"""Rotary position embedding: parameters from config.json, and the cosine and sine tables.

RoPE is arXiv 2104.09864; `linear` is position interpolation (arXiv 2306.15595), `dynamic` is
NTK-aware scaling that grows with the text (arXiv 2309.00071, section 3.3), `yarn` is
arXiv 2309.00071, `longrope` is arXiv 2402.13753, `llama3` is the frequency scaling published with
Llama 3.1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zipage.errors import ModelError
from zipage.models.config_values import MALFORMED, flag, number, whole_number

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

# Beyond any model's values, yet keeping the tables finite in fp32.
_SMALLEST, _LARGEST = 1e-6, 1e12


@dataclass(frozen=True)
class RopeParameters:
    """RoPE of one model.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the frequencies.
        factor: how many times the context is extended (all types but ``default``).
        original_max_positions: context length of the pretraining (``dynamic``, ``llama3``,
            ``yarn``, ``longrope``).
        low_freq_factor, high_freq_factor: bounds of the smoothed band (``llama3``).
        beta_fast, beta_slow: rotations that bound the ramp (``yarn``).
        truncate: round the ramp's bounds outward to whole dimensions (``yarn``).
        attention_factor: multiplies the cosines and sines (``yarn``, ``longrope``; 1 otherwise).
        partial_rotary_factor: rotated share of each head.
        short_factors, long_factors: divisors of the frequencies within the original length and
            beyond it, one for each rotated pair of dimensions (``longrope``).
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
    partial_rotary_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated, from the first."""
        return int(head_dim * self.partial_rotary_factor)

    def stretched(self, max_positions: int) -> int:
        """The longest text of a model whose config.json names `max_positions`.

        There, ``linear``, ``llama3`` and ``longrope`` models name the stretched length, ``dynamic``
        models the original length, and ``yarn`` models either.
        """
        if self.rope_type in ("dynamic", "yarn"):
            return max(max_positions, int(self.factor * self.original_max_positions))
        return max_positions

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ModelError unless the parameters fit heads of `head_dim` dimensions."""
        rotated = self.rotary_dim(head_dim)
        if rotated < 2 or rotated % 2:
            raise ModelError(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {rotated} of "
                f"{head_dim} dimensions; it must be an even number of them"
            )
        if self.rope_type == "dynamic" and rotated < 4:
            raise ModelError("rope type 'dynamic' needs at least 4 rotated dimensions")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if self.rope_type == "longrope" and len(factors) != rotated // 2:
                raise ModelError(
                    f"rope type 'longrope' needs {rotated // 2} {name[:-1]} numbers, one for each "
                    f"pair of rotated dimensions, got {len(factors)}"
                )


def parse_rope_parameters(raw: Mapping[str, Any]) -> RopeParameters:
    """Read the RoPE part of a config.json.

    Accepts ``rope_theta`` with ``rope_scaling`` and the newer ``rope_parameters``.

    Args:
        raw: the whole config.json.

    Raises:
        ModelError: the type is unknown, a parameter is missing or out of range, or RoPE differs
            between layers.
    """
    found: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{key}: rope parameters must be an object, got {value!r}")
        found = value or found
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ModelError(f"rope parameters that differ between layers are not supported: {found}")
    try:
        return _RopeParser(raw, found).parse()
    except ModelError:
        raise
    except MALFORMED as error:
        raise ModelError(
            f"malformed rope parameters {found} ({type(error).__name__}: {error})"
        ) from error


class _RopeParser:
    """Reads one set of rope parameters."""

    def __init__(self, raw: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.raw = raw
        self.scaling = {key: value for key, value in found.items() if value is not None}
        self.rope_type = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        # Early Phi-3 checkpoints use this name for longrope.
        if self.rope_type == "su" or (self.rope_type == "yarn" and "short_factor" in self.scaling):
            self.rope_type = "longrope"
        longest = raw.get("max_position_embeddings")
        self.longest = None if longest is None else whole_number(raw, "max_position_embeddings")

    def parse(self) -> RopeParameters:
        if self.rope_type not in ROPE_TYPES:
            raise ModelError(
                f"unknown rope type {self.rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
            )
        for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
            outer = self.raw.get(key)
            self.scaling.setdefault(key, default if outer is None else outer)
        theta = self.number("rope_theta")
        if theta <= 1:
            raise ModelError(f"rope_theta must be greater than 1, got {theta}")
        partial = self.number("partial_rotary_factor")
        if partial > 1:
            raise ModelError(f"partial_rotary_factor {partial} must be at most 1")
        return RopeParameters(
            self.rope_type,
            theta,
            partial_rotary_factor=partial,
            **getattr(self, f"_{self.rope_type}")(),
        )

    def number(self, name: str, default: float | None = None) -> float:
        try:
            return number({name: default, **self.scaling}, name, _SMALLEST, _LARGEST)
        except ModelError as error:
            raise ModelError(f"rope type {self.rope_type!r}: {error}") from None

    def original(self) -> int:
        key = "original_max_position_embeddings"
        outer = self.raw.get(key)
        value = self.scaling.get(key, self.longest) if outer is None else outer
        # Some checkpoints write it as 8192.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return whole_number({key: value}, key, smallest=2)
        except ModelError as error:
            raise ModelError(f"rope type {self.rope_type!r}: {error}") from None

    def _default(self) -> dict[str, Any]:
        return {}

    def _linear(self) -> dict[str, Any]:
        return {"factor": self.number("factor")}

    def _dynamic(self) -> dict[str, Any]:
        if self.longest is None:
            raise ModelError("rope type 'dynamic' needs max_position_embeddings")
        return {"factor": self.number("factor"), "original_max_positions": self.longest}

    def _llama3(self) -> dict[str, Any]:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if high <= low:
            raise ModelError(
                f"rope type 'llama3' needs high_freq_factor > low_freq_factor, got {high} and {low}"
            )
        return {
            "factor": self.number("factor"),
            "original_max_positions": self.original(),
            "low_freq_factor": low,
            "high_freq_factor": high,
        }

    def _yarn(self) -> dict[str, Any]:
        original = self.original()
        factor = self.number("factor", self.longest / original if self.longest else None)
        mscale, mscale_all = (
            None if self.scaling.get(name) in (None, 0) else self.number(name)
            for name in ("mscale", "mscale_all_dim")
        )
        if mscale and mscale_all:
            attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        else:
            attention = _yarn_mscale(factor, 1.0)
        fast, slow = self.number("beta_fast", 32.0), self.number("beta_slow", 1.0)
        if fast < slow:
            raise ModelError(
                f"rope type 'yarn' needs beta_fast >= beta_slow, got {fast} and {slow}"
            )
        return {
            "factor": factor,
            "original_max_positions": original,
            "beta_fast": fast,
            "beta_slow": slow,
            "truncate": flag(self.scaling, "truncate", True),
            "attention_factor": self.number("attention_factor", attention),
        }

    def _longrope(self) -> dict[str, Any]:
        original = self.original()
        factor = self.number("factor", self.longest / original if self.longest else None)
        attention = 1.0
        if factor > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "factor": factor,
            "original_max_positions": original,
            "attention_factor": self.number("attention_factor", attention),
            "short_factors": self.factors("short_factor"),
            "long_factors": self.factors("long_factor"),
        }

    def factors(self, name: str) -> tuple[float, ...]:
        values = self.scaling.get(name)
        if not isinstance(values, list) or not all(
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and _SMALLEST <= value <= _LARGEST
            for value in values
        ):
            raise ModelError(
                f"rope type 'longrope' needs {name} as a list of numbers from {_SMALLEST:g} to "
                f"{_LARGEST:g}, got {values!r}"
            )
        return tuple(map(float, values))


def build_rope_tables(
    rope: RopeParameters, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosine and sine tables of one model.

    A row depends only on its position, and with ``longrope`` on `max_positions`, so a token's key
    is the same whatever chunk computes it. Two types of RoPE change their frequencies with the
    length of the text; for them this means:

    - ``dynamic``: position p is rotated by the frequencies of a text of p + 1 tokens. Texts within
      the original length, and texts that grow beyond it token by token, are computed as in
      transformers, whose cached keys keep the frequencies they were computed with. A prompt longer
      than the original length differs: transformers rotates all of it by the frequencies of its
      whole length.
    - ``longrope``: the short factors if `max_positions` is within the original length, else the
      long ones for all positions, as in vLLM; transformers chooses by the length of each text.

    Args:
        rope: its parameters.
        head_dim: D, even.
        max_positions: rows of the tables, positions 0 to `max_positions` - 1.
        device: where the tables live.

    Returns:
        cos, sin: ``[max_positions, R / 2]`` fp32, R the rotated dimensions of a head, multiplied
        by the attention factor.

    Raises:
        ModelError: there is not enough memory for the tables.
    """
    rotated = rope.rotary_dim(head_dim)
    # The angles, their cosines and sines, and a temporary of the last multiplication.
    size = 4 * 4 * max_positions * (rotated // 2)
    try:
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError("more than the machine has")
        cos, sin = _rope_tables(rope, rotated, max_positions)
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises RuntimeError
        raise ModelError(
            f"RoPE tables of {max_positions} positions take {size / 2**30:.1f} GiB while they are "
            f"computed, which is not available: set a smaller max_model_len ({error})"
        ) from error
    return cos.to(device), sin.to(device)


def _rope_tables(
    rope: RopeParameters, rotated: int, max_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables on the CPU, so that all devices use the same frequencies."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    powers = rope.theta**exponents
    positions = torch.arange(max_positions, dtype=torch.float32)
    if rope.rope_type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(rope, exponents, positions)
    else:
        if rope.rope_type == "yarn":
            frequencies = _yarn_frequencies(rope, powers)
        elif rope.rope_type == "llama3":
            frequencies = _llama3_frequencies(rope, 1.0 / powers)
        elif rope.rope_type == "longrope":
            within = max_positions <= rope.original_max_positions
            factors = rope.short_factors if within else rope.long_factors
            frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
        else:
            frequencies = 1.0 / powers / rope.factor
        angles = torch.outer(positions, frequencies)
    scale = rope.attention_factor
    return angles.cos() * scale, angles.sin() * scale


def _dynamic_frequencies(
    rope: RopeParameters, exponents: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Frequencies ``[positions, R / 2]`` of texts that end with each position.

    The base grows with the length, so that the lowest frequency is interpolated by the ratio of
    the lengths and the highest stays the same.
    """
    original = rope.original_max_positions
    lengths = (positions + 1).clamp(min=original)
    growth = rope.factor * lengths / original - (rope.factor - 1)
    rotated = 2 * exponents.numel()
    bases = rope.theta * growth ** (rotated / (rotated - 2))
    return 1.0 / bases[:, None] ** exponents


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
