"""The required form of an answer: vLLM's names and meanings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zipage.errors import RequestError, shown

MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Most characters of a schema, regex or grammar, or of all choices together."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer; exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        json_object: True for any JSON object.
        regex: a regular expression that the whole answer matches (Rust's syntax, no look-around).
        choice: strings, one of which must be the answer. Stored as a tuple.
        grammar: a context-free grammar in Lark's or llama.cpp's GBNF notation.
        disable_any_whitespace: JSON without optional whitespace. Otherwise its parts may be
            separated by a space, or by a newline and indentation.
        reasoning_end_token_ids: tokens that end the reasoning, such as ``</think>``: the form
            applies to the text after the first of them. None, the default, applies it to the whole
            answer. Stored as a tuple.

    Raises:
        RequestError: an option has an illegal value.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    reasoning_end_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Checks every option and converts it to its plain type."""
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}; "
                f"given: {', '.join(given) or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _illegal(name, getattr(self, name), "True or False")
        object.__setattr__(self, "disable_any_whitespace", bool(self.disable_any_whitespace))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _illegal(name, value, "text that is not empty")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            legal = f"at most {MAX_GRAMMAR_CHARACTERS} characters"
            raise _illegal(given[0], self.text, legal)
        if self.reasoning_end_token_ids is not None:
            ids = _ids(self.reasoning_end_token_ids)
            object.__setattr__(self, "reasoning_end_token_ids", ids)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> StructuredOutputsParams:
        """Makes parameters from a mapping, such as a decoded JSON object.

        Raises:
            RequestError: a key is not an option or a value is illegal.
        """
        names = [field.name for field in fields(cls)]
        for key in options:
            if key not in names:
                raise RequestError(f"unknown option {shown(key)} of structured_outputs: {names}")
        return cls(**options)

    def _given(self) -> list[str]:
        values = ((kind, getattr(self, kind)) for kind in _KINDS)
        return [kind for kind, value in values if value is not None and value is not False]

    @property
    def kind(self) -> str:
        """Name of the form that was given."""
        return self._given()[0]

    @property
    def text(self) -> str:
        """The schema, expression or grammar; choices as a JSON list."""
        if self.kind == "json_object":
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return json.dumps(value) if self.kind == "choice" else str(value)


def _illegal(name: str, value: object, legal: str) -> RequestError:
    return RequestError(f"structured_outputs.{name}={shown(value)} is not legal: must be {legal}")


def _schema(value: object) -> str:
    legal = "a JSON schema: a mapping, or the text of a JSON object or boolean"
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value), allow_nan=False)
        if isinstance(value, str):
            schema = json.loads(value)
            if isinstance(schema, bool):  # written as objects, to which options can be added
                return "{}" if schema else '{"not": {}}'
            if isinstance(schema, dict):
                return value
    except (TypeError, ValueError, RecursionError):
        pass
    raise _illegal("json", value, legal)


def _choices(value: object) -> tuple[str, ...]:
    legal = "a list of strings, none of them empty"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _illegal("choice", value, legal)
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise _illegal("choice", choice, legal)
    return tuple(dict.fromkeys(value))


def _ids(value: object) -> tuple[int, ...]:
    legal = "a list of token ids (integers from 0), not empty"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise _illegal("reasoning_end_token_ids", value, legal)
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _illegal("reasoning_end_token_ids", token_id, legal)
    return tuple(value)
