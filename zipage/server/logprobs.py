"""Log-probabilities in the formats of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zipage.engine.token_pieces import token_pieces
from zipage.outputs import Logprob, RequestOutput

#: Replaces minus infinity, which JSON cannot express; vLLM's value.
LOWEST = -9999.0


class TokenTexts:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._pieces = None
        if tokenizer is not None:
            self._pieces = token_pieces(tokenizer, skip_special_tokens=False)

    def bytes_of(self, token_id: int, text: str) -> list[int]:
        """The token's bytes: those of its text, unless it is a piece of a character."""
        if self._pieces is not None:
            return list(self._pieces[token_id])
        return list(text.encode())


def most_likely(
    entries: Sequence[dict[int, Logprob] | None], token_ids: Sequence[int], top: int
) -> list[dict[int, Logprob] | None]:
    """Of each position, the `top` most likely tokens and the one that stands there."""
    return [
        entry and {t: logprob for t, logprob in entry.items() if logprob.rank <= top or t == own}
        for own, entry in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs(output: RequestOutput, top: int) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt's tokens in vLLM's format; the first token has none."""
    entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": max(logprob.logprob, LOWEST),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in entry.items()
        }
        for entry in most_likely(entries, output.prompt_token_ids, top)
    ]


def chat_logprobs(
    entries: Sequence[dict[int, Logprob]],
    token_ids: Sequence[int],
    top: int,
    texts: TokenTexts,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Log-probabilities of generated tokens and of the `top` most likely, for chat completions.

    With `as_ids`, tokens are named ``token_id:ID`` in place of their text.
    """

    def shape(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {
            "token": f"token_id:{token_id}" if as_ids else text,
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": texts.bytes_of(token_id, text),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        best = sorted(entry.items(), key=lambda item: item[1].rank)
        alternatives = [shape(t, logprob) for t, logprob in best if logprob.rank <= top]
        content.append({**shape(token_id, entry[token_id]), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


class CompletionLogprobWriter:
    """Log-probabilities of one choice's tokens for completions, piece by piece.

    Args:
        as_ids: name tokens ``token_id:ID`` in place of their text.
    """

    def __init__(self, as_ids: bool) -> None:
        self._as_ids, self._offset = as_ids, 0

    def write(
        self, entries: Sequence[dict[int, Logprob] | None], token_ids: Sequence[int], first: str
    ) -> dict[str, Any]:
        """The next tokens; `first` is the text of a token that has no entry."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = first if entry is None else entry[token_id].decoded_token or ""
            tokens.append(self._name(token_id, text))
            offsets.append(self._offset)
            self._offset += len(text)
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(max(entry[token_id].logprob, LOWEST))
            top: dict[str, float] = {}
            # Different pieces of characters have the same text: the most likely one is reported.
            for other, logprob in sorted(entry.items(), key=lambda item: item[1].rank):
                name = self._name(other, logprob.decoded_token or "")
                top.setdefault(name, max(logprob.logprob, LOWEST))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text
