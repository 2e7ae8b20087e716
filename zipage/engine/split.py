"""Splitting a step that failed into smaller ones."""

from __future__ import annotations

from collections.abc import Sequence

from zipage.engine.scheduler import ScheduledTokens

Part = list[ScheduledTokens]


def halve_requests(part: Part) -> tuple[Part, Part]:
    """The first half of the requests, and the second."""
    middle = len(part) // 2
    return part[:middle], part[middle:]


def halve_tokens(part: Part) -> tuple[Part, Part]:
    """Two parts of about equally many tokens, to be computed in this order.

    A request of several tokens may be split: it computes its first tokens in the first part and
    the others in the second, where it samples if it does, as in chunked prefill.
    """
    room = sum(item.num_tokens for item in part) // 2
    first: Part = []
    second: Part = []
    for item in part:
        taken = min(room, item.num_tokens)
        room -= taken
        if taken == item.num_tokens:
            first.append(item)
            continue
        if taken:
            first.append(ScheduledTokens(item.request, taken, samples=False))
        second.append(ScheduledTokens(item.request, item.num_tokens - taken, item.samples))
    return first, second


def largest(part: Sequence[ScheduledTokens]) -> ScheduledTokens:
    """The item that needs the most memory: by tokens computed, then by tokens read."""
    return max(part, key=lambda item: (item.num_tokens, item.request.length))
