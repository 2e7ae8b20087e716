"""Splitting a model's reasoning, ``<think>...</think>``, from its answer as it is generated."""

from __future__ import annotations

from typing import Any

OPEN, CLOSE = "<think>", "</think>"


def uses_think_tags(chat_template: str | None, tokenizer: Any) -> bool:
    """Whether a model marks its reasoning with ``<think>``: the ``auto`` setting."""
    if chat_template and (OPEN in chat_template or CLOSE in chat_template):
        return True
    return tokenizer is not None and CLOSE in tokenizer.get_added_vocab()


def prompt_opens_reasoning(prompt: str, continued: str | None = None) -> bool | None:
    """Whether the answer to a rendered prompt starts inside the reasoning.

    Args:
        prompt: the rendered conversation with the opening of the assistant's turn.
        continued: the text of the final message if it is to be continued.

    Returns:
        True or False if the end of the prompt tells, None if the answer may open it itself.
    """
    if continued:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    end = prompt.rstrip()
    return True if end.endswith(OPEN) else False if end.endswith(CLOSE) else None


def certain_length(text: str, tag: str) -> int:
    """Length of the text that cannot be the start of whitespace followed by `tag`."""
    known = min(len(tag) - 1, len(text))
    while not text.endswith(tag[:known]):
        known -= 1
    return len(text[: len(text) - known].rstrip())


class ReasoningSplitter:
    """Separates reasoning from answer, piece by piece, however the text is cut.

    The tags and the whitespace around them are left out.

    Args:
        opened: whether the prompt opened the reasoning; None if the answer may open it as its
            first word.
    """

    def __init__(self, opened: bool | None) -> None:
        self._opened = opened
        self._state = "answer" if opened is False else "start"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Takes text; returns the reasoning and the answer that are now certain."""
        if self._state == "answer":
            return "", text
        self._held += text
        reasoning = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held = "open", begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                return "", ""
            elif self._opened:
                self._state = "open"
            else:
                return "", self._release()
        if self._state == "open":
            self._held = self._held.lstrip()
            if not self._held:
                return "", ""
            self._state = "reasoning"
        if self._state == "reasoning":
            before, closed, after = self._held.partition(CLOSE)
            if not closed:
                certain = certain_length(before, CLOSE)
                self._held = before[certain:]
                return before[:certain], ""
            reasoning, self._held, self._state = before.rstrip(), after, "closed"
        begun = self._held.lstrip()
        if not begun:
            return reasoning, ""
        self._held = begun
        return reasoning, self._release()

    def finish(self) -> tuple[str, str]:
        """Returns the text held back when the answer ended."""
        held, self._held = self._held, ""
        if self._state in ("open", "reasoning") or (self._state == "start" and self._opened):
            return held.strip() if self._state != "reasoning" else held.rstrip(), ""
        return "", held if self._state == "start" else ""

    def _release(self) -> str:
        held, self._held, self._state = self._held, "", "answer"
        return held
