"""Values of a config.json, checked for a type and range that a model can have; else ModelError.

A comparison with NaN is false and Python's integers are unbounded, so every check has the form
``smallest <= value <= largest``, which rejects both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zipage.errors import ModelError, shown

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

LARGEST_SIZE = 2**31 - 1
# Far beyond any model, and few enough that a mistake does not fill the memory with objects.
MOST_LAYERS = 4096
MOST_EXPERTS = 65536

#: Exceptions a malformed value can raise in code that reads it.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def whole_number(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    smallest: int = 1,
    largest: int = LARGEST_SIZE,
) -> int:
    """A size or a count; `default` where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        kind = "a positive integer" if smallest == 1 else f"an integer of at least {smallest}"
        raise ModelError(f"{key} must be {kind}, got {_shown(value)}")
    if value > largest:
        raise ModelError(f"{key} must be at most {largest}, got {_shown(value)}")
    return value


def number(raw: Mapping[str, Any], key: str, smallest: float, largest: float) -> float:
    """A number within a range."""
    value = raw.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not smallest <= value <= largest
    ):
        raise ModelError(
            f"{key} must be a number from {smallest:g} to {largest:g}, got {_shown(value)}"
        )
    return float(value)


def flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; `default` where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or value not in (0, 1):
        raise ModelError(f"{key} must be true or false, got {_shown(value)}")
    return bool(value)


def strings(raw: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings; empty where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{key} must be a list of strings, got {_shown(value)}")
    return value


def architecture_names(raw: Mapping[str, Any]) -> list[str]:
    """``architectures``; a plain string counts as a list of one."""
    value = raw.get("architectures")
    return [value] if isinstance(value, str) else strings(raw, "architectures")


def token_ids(value: Any, key: str = "eos_token_id") -> tuple[int, ...]:
    """Token ids that a configuration gives as one number, a list or null."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{key} must be a token id or a list of them, got {_shown(value)}")
    return tuple(ids)


def checkpoint_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config.json names, float32 if none."""
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if name is not None:
            if not isinstance(name, str) or name not in DTYPES:
                raise ModelError(f"{key} {_shown(name)} is not supported, only {', '.join(DTYPES)}")
            return DTYPES[name]
    return torch.float32


def refuse_quantised(raw: Mapping[str, Any]) -> None:
    """Raise ModelError when the weights are quantised."""
    found = raw.get("quantization_config")
    if found is None or found == {}:
        return
    if not isinstance(found, Mapping):
        raise ModelError(f"quantization_config must be an object, got {_shown(found)}")
    method = found.get("quant_method", "unknown")
    raise ModelError(
        f"quantised weights (quant_method {_shown(method)}) are not supported; "
        f"use a float32, bfloat16 or float16 checkpoint"
    )


def _shown(value: Any) -> str:
    """A value for a message; the size of an integer too long for repr."""
    if isinstance(value, int) and abs(value) >= 10**100:
        return f"an integer of {value.bit_length()} bits"
    return shown(value)
