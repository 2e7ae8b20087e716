"""Finding tool calls in a model's answer as it is generated."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from zipage.server.call_scanner import CallScanner
from zipage.server.reasoning import certain_length

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass
class ToolCallDelta:
    """What was added to a call: first its id and name, then pieces of the arguments' JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Piece:
    """What a piece of text added to an answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class ToolCallParser(Protocol):
    """Splits text into content and calls, however it is cut."""

    def push(self, text: str) -> Piece:
        """Takes text; returns the parts that are now certain."""

    def finish(self, truncated: bool) -> Piece:
        """Returns the text held back. `truncated`: the answer was cut by its length limit."""


def call_style(chat_template: str | None) -> str:
    """How a model writes its calls, from its chat template: the ``auto`` setting."""
    template = chat_template or ""
    if _OPEN in template:
        return "hermes"
    if "tools" in template and '"parameters"' in template:
        return "llama3_json"
    return "none"


class _Calls:
    """The calls of one answer: their numbers and ids, and the one being read.

    When streaming, a call counts once its name is known to be a tool's and its arguments have
    begun; otherwise, once it is complete and its arguments are JSON.
    """

    def __init__(self, names: Collection[str], streaming: bool, most: int | None) -> None:
        self._names, self._streaming, self._most = names, streaming, most
        self._index = -1
        self.begin()

    def begin(self) -> None:
        """Read another call."""
        self.scanner, self._announced, self._sent = CallScanner(), False, 0

    @property
    def any(self) -> bool:
        """Whether there was a call."""
        return self._index >= 0

    def push(self, text: str, piece: Piece) -> bool:
        """Take text of the call; False if it turns out not to be a call."""
        scanner = self.scanner
        scanner.push(text)
        if not self._announced:
            if scanner.state == "failed" or (scanner.name and scanner.name not in self._names):
                return False
            complete = scanner.state == "done"
            if complete and not self._streaming and not scanner.is_valid:
                return False
            if scanner.name and (complete or (self._streaming and scanner.started)):
                self._announce(piece)
        self._send(piece)
        return True

    def finish(self, truncated: bool, piece: Piece) -> bool:
        """The answer ended inside the call; False if it does not count as one so far."""
        if not self._announced and truncated and self.scanner.name and self.scanner.started:
            self._announce(piece)
            self._send(piece)
        return self._announced

    def _announce(self, piece: Piece) -> None:
        self._announced = True
        self._index += 1
        if self._most is None or self._index < self._most:
            piece.tool_calls.append(ToolCallDelta(self._index, new_call_id(), self.scanner.name))

    def _send(self, piece: Piece) -> None:
        if self._announced and (self._most is None or self._index < self._most):
            fresh = self.scanner.arguments[self._sent :]
            self._sent += len(fresh)
            if fresh and piece.tool_calls and piece.tool_calls[-1].index == self._index:
                piece.tool_calls[-1].arguments += fresh
            elif fresh:
                piece.tool_calls.append(ToolCallDelta(self._index, arguments=fresh))


class _CallsParser(ABC):
    """Finds calls in text, whatever surrounds them.

    Args:
        names: names of the tools.
        streaming: announce calls before they are complete.
        most: calls returned; further ones are dropped.
    """

    #: The first state, and the state after a call.
    _first, _behind = "text", "close"

    def __init__(self, names: Collection[str], streaming: bool, most: int | None = None) -> None:
        self._calls = _Calls(names, streaming, most)
        self._state = self._first
        self._held = ""
        #: The text between the content and the call being read.
        self._before = ""

    def push(self, text: str) -> Piece:
        """Takes text; returns what is now certain."""
        piece = Piece()
        self._held += text
        while self._held and (self._read(piece) if self._state == "call" else self._step(piece)):
            pass
        return piece

    def finish(self, truncated: bool) -> Piece:
        """Returns what was held back."""
        piece = Piece()
        if self._state == "call" and not self._calls.finish(truncated, piece):
            piece.content = self._before + self._calls.scanner.raw
        elif self._state != "call":
            piece.content = self._rest()
        self._held = ""
        return piece

    def _read(self, piece: Piece) -> bool:
        """Handle text of a call; returns whether there is more to do."""
        text, self._held = self._held, ""
        scanner = self._calls.scanner
        if not self._calls.push(text, piece):
            piece.content += self._before + scanner.raw
            self._state = "text"
        elif scanner.state == "open":
            return False
        else:
            self._state = self._behind
        self._held = scanner.rest
        return True

    @abstractmethod
    def _step(self, piece: Piece) -> bool:
        """Handle held text outside a call; returns whether there is more to do."""

    @abstractmethod
    def _rest(self) -> str:
        """The text still held at the end of the answer."""


class HermesParser(_CallsParser):
    """Calls as ``<tool_call>{...}</tool_call>`` among text (Hermes, Qwen).

    Whitespace around calls is left out. Text that is not a call stays in the content.
    """

    def _step(self, piece: Piece) -> bool:
        if self._state == "text":
            before, found, after = self._held.partition(_OPEN)
            if not found:
                certain = certain_length(self._held, _OPEN)
                piece.content += self._held[:certain]
                self._held = self._held[certain:]
                return False
            piece.content += before.rstrip()
            self._before = before[len(before.rstrip()) :] + _OPEN
            self._held, self._state = after, "call"
            self._calls.begin()
            return True
        # After a call, text up to the closing tag is ignored; without a closing tag, text resumes.
        begun = self._held.lstrip()
        if begun.startswith(_CLOSE):
            self._held, self._state = begun[len(_CLOSE) :], "text"
            return bool(self._held)
        if _CLOSE.startswith(begun):
            return False
        self._state = "text"
        return True

    def _rest(self) -> str:
        is_content = self._state == "text" and (self._held.strip() or not self._calls.any)
        return self._held if is_content else ""


class JsonCallsParser(_CallsParser):
    """An answer that consists of calls only: JSON objects one after another.

    Args:
        names: names of the tools.
        streaming: announce calls before they are complete.
        most: calls returned; further ones are dropped.
        opening: text that may precede the first one.
        separator: text between two calls.
        closing: text that may follow the last one.
    """

    _first, _behind = "start", "between"

    def __init__(
        self,
        names: Collection[str],
        streaming: bool,
        most: int | None = None,
        opening: str = _PYTHON_TAG,
        separator: str = ";",
        closing: str = "",
    ) -> None:
        super().__init__(names, streaming, most)
        self._opening, self._separator, self._closing = opening, separator, closing

    def _step(self, piece: Piece) -> bool:
        if self._state == "text":
            piece.content += self._held
            self._held = ""
            return False
        begun = self._held.lstrip()
        mark = self._opening if self._state == "start" else self._separator
        known = self._before if self._state == "start" else ""
        if mark and begun.startswith(mark) and mark not in known:
            self._before += self._held[: len(self._held) - len(begun)] + mark
            self._held = begun[len(mark) :]
            self._state = "start" if self._state == "start" else "next"
            return True
        if begun.startswith("{") and self._state in ("start", "next"):
            if self._state == "next":
                self._before = self._separator + " "
            self._before += self._held[: len(self._held) - len(begun)]
            self._held, self._state = begun, "call"
            self._calls.begin()
            return True
        waits = not begun or (mark.startswith(begun) and self._state != "next")
        if waits or (self._closing and begun.strip() == self._closing):
            return False
        self._held, self._before = self._before * (self._state == "start") + self._held, ""
        self._state = "text"
        return True

    def _rest(self) -> str:
        return self._before + self._held if self._state == "start" else ""


class NamedCallParser:
    """An answer that is the arguments of one tool's call, as structured output produces it."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def push(self, text: str) -> Piece:
        """Takes text; returns what is now certain."""
        text = text if self._begun else text.lstrip()
        if not text:
            return Piece()
        first, self._begun = not self._begun, True
        call_id, name = (new_call_id(), self._name) if first else (None, None)
        return Piece(tool_calls=[ToolCallDelta(0, call_id, name, text)])

    def finish(self, truncated: bool) -> Piece:
        """Nothing is held back."""
        return Piece()


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
