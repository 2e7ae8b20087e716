"""The policy interface: scores of cached tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from zipage.compression.view import CacheView
from zipage.errors import ConfigError


class PolicyScores(NamedTuple):
    """A policy's scores of the T cached tokens of L layers and H KV heads.

    Attributes:
        final: ``[L, H, T]`` fp32; the tokens with the largest are kept.
        stored: ``[L, H, T]`` fp32 to store with the tokens until the next compression, or None.
    """

    final: torch.Tensor
    stored: torch.Tensor | None = None


class Legal(NamedTuple):
    """The values an option may take, as a test and in words."""

    accepts: Callable[[Any], bool]
    words: str


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


Fraction = Annotated[float, Legal(lambda x: _is_number(x) and 0 <= x <= 1, "a number from 0 to 1")]
Positive = Annotated[float, Legal(lambda x: _is_number(x) and 0 < x < inf, "a number above 0")]
Count = Annotated[int, Legal(lambda x: _is_int(x) and x >= 0, "an integer from 0 up")]
Kernel = Annotated[
    int, Legal(lambda x: _is_int(x) and x > 0 and x % 2 == 1, "an odd integer from 1 (none) up")
]
"""Option types; `Kernel` is the width of a centred pooling window."""


def _legal(annotation: Any) -> Legal:
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return Legal(lambda x: isinstance(x, str) and x in values, " or ".join(map(repr, values)))
    legal: Legal = annotation.__metadata__[0]
    return legal


@dataclass(frozen=True)
class Policy(ABC):
    """Maps a view of a request's cache to scores.

    A policy knows nothing about blocks, kernels, selection or moving. Its fields are its options,
    each typed with a Literal or one of the option types above. It must depend on the view alone:
    the same request gets the same scores whatever runs beside it. A layer's scores must not depend
    on other layers, because a view may hold only some of them.

    Attributes:
        name: its name for users.
        default_window: tokens of the window unless the engine's options set it.

    Raises:
        ConfigError: an option has an illegal value.
    """

    name: ClassVar[str]
    default_window: ClassVar[int] = 16

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for option in fields(self):
            value, legal = getattr(self, option.name), _legal(hints[option.name])
            if not legal.accepts(value):
                raise ConfigError(
                    f"policy {self.name!r}: option {option.name} must be {legal.words}, "
                    f"got {value!r}"
                )

    @abstractmethod
    def scores(self, view: CacheView) -> PolicyScores:
        """Score every cached token of every layer and KV head."""
