"""Reading one tool call, ``{"name": ..., "arguments": {...}}``, while its JSON is generated."""

from __future__ import annotations

import json
from typing import Any

_WHITESPACE = " \t\r\n"
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class CallScanner:
    """A scanner of one JSON object that looks at every character once.

    Attributes:
        name: the function, once it is known.
        arguments: JSON text of the arguments so far, as the model wrote it.
        started: whether the arguments have begun.
        state: ``open``, ``done`` at the closing brace, or ``failed`` if it is not a call.
        raw: all text taken.
        rest: the text after the end, or after the failure.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.started = False
        self.state = "open"
        self.raw = ""
        self.rest = ""
        self._expect = self._brace
        self._key = ""
        self._token: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def is_valid(self) -> bool:
        """Whether the arguments are a JSON object."""
        return isinstance(_parsed(self.arguments), dict)

    def push(self, text: str) -> None:
        """Take more text."""
        for position, character in enumerate(text):
            self._expect(character)
            if self.state != "open":
                self.raw += text[: position + 1]
                self.rest = text[position + 1 :]
                return
        self.raw += text

    def _brace(self, c: str) -> None:
        if c == "{":
            self._expect = self._key_or_end
        elif c not in _WHITESPACE:
            self.state = "failed"

    def _key_or_end(self, c: str) -> None:
        if c == "}":
            self._close()
        else:
            self._key_start(c)

    def _key_start(self, c: str) -> None:
        if c == '"':
            self._token, self._in_string = [c], True
            self._expect = self._in_key
        elif c not in _WHITESPACE:
            self.state = "failed"

    def _in_key(self, c: str) -> None:
        self._token.append(c)
        self._track_string(c)
        if not self._in_string:
            self._key = str(_parsed("".join(self._token)))
            known = self._key in _KEYS
            repeated = self._key == "name" and self.name is not None
            repeated |= self._key in ("arguments", "parameters") and self.started
            self._expect = self._colon
            if not known or repeated:
                self.state = "failed"

    def _colon(self, c: str) -> None:
        if c == ":":
            self._expect = self._value_start
        elif c not in _WHITESPACE:
            self.state = "failed"

    def _value_start(self, c: str) -> None:
        if c in _WHITESPACE:
            return
        self._token, self._depth = [], 0
        if self._is_arguments and c == "{":
            self.started = True
        self._expect = self._in_value
        self._in_value(c)

    def _in_value(self, c: str) -> None:
        in_scalar = not self._in_string and self._depth == 0 and self._token
        if in_scalar and c in ",} \t\r\n":
            self._end_value()
            if self.state == "open":
                self._after_value(c)
            return
        self._take(c)
        if self._in_string:
            self._track_string(c)
            if not self._in_string and self._depth == 0:
                self._end_value()
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
            elif self._depth < 0:
                self.state = "failed"

    def _take(self, c: str) -> None:
        self._token.append(c)
        if self._is_arguments and self.started:
            self.arguments += c

    def _after_value(self, c: str) -> None:
        if c == ",":
            self._expect = self._key_start
        elif c == "}":
            self._close()
        elif c not in _WHITESPACE:
            self.state = "failed"

    def _end_value(self) -> None:
        self._expect = self._after_value
        if self.started and self._is_arguments:
            return
        text = "".join(self._token)
        value = _parsed(text)
        if self._key == "name":
            self.name = value if isinstance(value, str) else None
            if not self.name:
                self.state = "failed"
        elif self._is_arguments:
            # Some models write the arguments as a string that contains JSON.
            self.arguments = "{}" if text == "null" else value if isinstance(value, str) else ""
            self.started = True
            if not self.is_valid:
                self.state = "failed"

    def _close(self) -> None:
        self.state = "done" if self.name else "failed"
        if not self.started:
            self.arguments = "{}"

    def _track_string(self, c: str) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
