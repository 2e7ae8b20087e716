"""Finding stop strings in a text that arrives in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Aho-Corasick automaton over the stop strings of one request.

    Its state is the longest suffix of the text that is a prefix of a stop string, which is exactly
    what must be held back; each character costs one step, however many strings there are and
    however long (Aho and Corasick, CACM 18(6), 1975).

    Args:
        stops: non-empty strings.

    Attributes:
        matched: the stop string that was completed first, the longest of those that end at the
            same character; None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._held = ""
        self._state = 0
        self._first = frozenset(stop[0] for stop in stops)
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._longest = [0]
        self._hold = [0]
        self._build(stops)

    def push(self, text: str, may_stop: bool = True) -> str:
        """Takes the next part of the text; returns the text that can no longer be in a stop string.

        Args:
            text: the next part.
            may_stop: whether a stop string that ends in this part counts.

        Returns:
            Text up to the stop string when one was completed; what follows it is dropped.
        """
        if not self._state and self._first.isdisjoint(text):
            return text
        state = self._state
        for index, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(character, 0)
            length = self._longest[state]
            if length and may_stop:
                seen = self._held + text[: index + 1]
                self.matched = seen[-length:]
                self._held = ""
                return seen[:-length]
        self._state = state
        seen = self._held + text
        certain = len(seen) - self._hold[state]
        self._held = seen[certain:]
        return seen[:certain]

    def release(self) -> str:
        """Ends the text and returns the text held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _build(self, stops: Sequence[str]) -> None:
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                following = self._next[state].get(character)
                if following is None:
                    following = len(self._next)
                    self._next[state][character] = following
                    self._next.append({})
                    depth.append(depth[state] + 1)
                    self._longest.append(0)
                state = following
            self._longest[state] = len(stop)
        self._fallback = [0] * len(depth)
        self._hold = [0] * len(depth)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            # A complete stop string that is no prefix of another one need not be held back whole.
            self._hold[state] = depth[state] if self._next[state] else self._hold[fallback]
            self._longest[state] = self._longest[state] or self._longest[fallback]
            for character, following in self._next[state].items():
                queue.append(following)
                target = fallback
                while target and character not in self._next[target]:
                    target = self._fallback[target]
                self._fallback[following] = self._next[target].get(character, 0)
