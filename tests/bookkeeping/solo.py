"""What a request asks for and the text it must get, without blocks, slots or a scheduler.

In place of keys and values, every cached token has one integer, its *content*: a hash of the
token, its position, the salt and the sum of all contents that were visible when it was written.
The next token is a hash of the sum of all visible contents. So, as in a real model, a token that is
wrongly visible, missing, stale or overwritten changes the text from there on; and, as in attention,
the order of the slots does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Ask:
    """What a user asks for. `seed` makes samples of one prompt differ; one token in `stop_one_in`
    ends the text."""

    prompt: tuple[int, ...]
    max_tokens: int
    max_blocks: int | None = None
    window: int = 2
    priority: int = 0
    bounded_prefill: bool = False
    salt: bytes = b""
    seed: int = 0
    stop_one_in: int = 0


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of this length; equal seeds have equal beginnings."""
    return tuple((seed * 1000 + i * 7) % 997 for i in range(length))


def content_of(ask: Ask, position: int, token: int, visible: int) -> int:
    """What stands for the keys and values of a token that sees contents of sum `visible`."""
    return hash((int.from_bytes(ask.salt, "big"), position, token, visible))


def next_token(ask: Ask, visible: int) -> int:
    """The token that follows when the visible contents have this sum."""
    return hash((visible, ask.seed)) % VOCABULARY


def stops(ask: Ask, token: int) -> bool:
    """Whether a token ends the text."""
    return ask.stop_one_in > 0 and token % ask.stop_one_in == 0


def survivors(contents: Sequence[int], window: Sequence[int], keep: int, index: int) -> set[int]:
    """The `keep` contents kept by compression number `index`: the window, and others at random,
    but always the same ones for the same request."""
    kept = set(window)
    others = sorted((c for c in contents if c not in kept), key=lambda c: hash((c, index)))
    kept.update(others[: keep - len(kept)])
    return kept


def compact(contents: Sequence[int], kept: set[int], style: str) -> list[int]:
    """The cache after a compression in slot order: *stable*, or *holes* filled from the end."""
    if style == "stable":
        return [c for c in contents if c in kept]
    moving = [c for c in contents[len(kept) :] if c in kept]
    return [c if c in kept else moving.pop() for c in contents[: len(kept)]]


def solo_run(ask: Ask, block_size: int, style: str) -> tuple[list[int], list[list[int]]]:
    """The text of a request that has the machine for itself, straight from the definition, and its
    cache after each compression."""
    tokens = list(ask.prompt)
    cache: list[int] = []
    compressed: list[list[int]] = []
    position = 0
    while True:
        if ask.max_blocks is not None:
            limit = ask.max_blocks * block_size
            if not compressed and not ask.bounded_prefill:
                limit = max(limit, len(ask.prompt))
            if len(cache) >= limit:
                keep = (ask.max_blocks - 1) * block_size
                kept = survivors(cache, cache[-ask.window :], keep, len(compressed))
                cache = compact(cache, kept, style)
                compressed.append(list(cache))
        cache.append(content_of(ask, position, tokens[position], sum(cache)))
        position += 1
        if position == len(tokens):
            tokens.append(next_token(ask, sum(cache)))
            if len(tokens) - len(ask.prompt) == ask.max_tokens or stops(ask, tokens[-1]):
                return tokens, compressed
