"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from zipage.compression.policies.base import Policy, PolicyScores
from zipage.compression.policies.block import BlockPolicy
from zipage.compression.policies.h2o import H2OPolicy
from zipage.compression.policies.random import RandomPolicy
from zipage.compression.policies.rkv import RKVPolicy
from zipage.compression.policies.snapkv import SnapKVPolicy
from zipage.compression.policies.streaming import StreamingPolicy
from zipage.compression.policies.zipage import ZipagePaperPolicy, ZipagePolicy
from zipage.errors import ConfigError

__all__ = ["Policy", "PolicyScores", "default_window", "make_policy", "policy_names"]

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        ZipagePolicy,
        ZipagePaperPolicy,
        RKVPolicy,
        SnapKVPolicy,
        H2OPolicy,
        StreamingPolicy,
        BlockPolicy,
        RandomPolicy,
    )
}


def policy_names() -> tuple[str, ...]:
    """Names `make_policy` knows."""
    return tuple(_POLICIES)


def default_window(name: str) -> int:
    """Window of the policy called `name` unless the engine's options set it."""
    return _POLICIES[name].default_window if name in _POLICIES else Policy.default_window


def make_policy(name: str, options: Mapping[str, object]) -> Policy:
    """Build the policy called `name`.

    Args:
        name: one of `policy_names`.
        options: values of the policy's options; the others keep their defaults.

    Raises:
        ConfigError: unknown name or option, or an illegal value; says what is legal.
    """
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; legal are {', '.join(_POLICIES)}")
    policy: type[Any] = _POLICIES[name]
    legal = [option.name for option in fields(policy)]
    for option in options:
        if option not in legal:
            raise ConfigError(
                f"policy {name!r} has no option {option!r}; "
                f"legal are {', '.join(legal) if legal else 'none'}"
            )
    made: Policy = policy(**options)
    return made
