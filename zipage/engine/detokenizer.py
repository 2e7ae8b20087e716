"""Turning generated token ids into text, all at once or incrementally.

Both ways run the same decoder over the same tokens, so a stream always adds up to the final text.
The text is what the tokens add after the prompt: it keeps the leading space of a first word such
as ``▁Paris``, as vLLM does, and ignores ``clean_up_tokenization_spaces``. It equals
``tokenizer.decode`` of all tokens minus that of the prompt, wherever the tokens are valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from zipage.engine.stop_strings import StopStringMatcher
from zipage.engine.token_pieces import (
    REPLACEMENT,
    TokenPieces,
    special_token_ids,
    token_pieces,
    utf8_decoder,
)
from zipage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_PENDING_TOKENS = 16


class IncrementalDetokenizer:
    """Text of one completion, token by token.

    An incomplete character is held back until it is complete, and a possible beginning of a stop
    string until it is known not to be one. How tokens are grouped into calls makes no difference.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: what the completion follows; a character the prompt left incomplete is
            completed by the first tokens.
        params: ``stop``, ``stop_token_ids``, ``include_stop_str_in_output``, ``min_tokens`` and
            ``skip_special_tokens`` are obeyed.
        eos_token_ids: end-of-sequence tokens of the model. They and the ``stop_token_ids`` end
            the output, so they are not part of the text, even where ``skip_special_tokens`` is
            off, unless ``include_stop_str_in_output`` is set. With ``ignore_eos`` the former are
            tokens like any other.

    Attributes:
        stopped: the stop string that ended the text, or None. Later tokens are ignored.
        num_tokens: tokens taken so far, up to the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._stream = _stream(tokenizer, prompt_token_ids, params)
        self._hidden = _hidden_token_ids(params, eos_token_ids)
        self._matcher = StopStringMatcher(params.stop_strings) if params.stop_strings else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that is now certain."""
        if self.stopped is not None:
            return ""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._emit(self._stream.feed(self._visible(token_ids)))
        emitted = ""
        for token_id in token_ids:
            self.num_tokens += 1
            emitted += self._scan(self._matcher, self._stream.feed(self._visible((token_id,))))
            if self.stopped is not None:
                break
        return self._emit(emitted)

    def finish(self) -> str:
        """Returns the text held back; a character that stayed incomplete becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._stream.flush()
        if self._matcher is not None:
            rest = self._scan(self._matcher, rest)
            if self.stopped is None:
                rest += self._matcher.release()
        return self._emit(rest)

    def _visible(self, token_ids: Sequence[int]) -> Sequence[int]:
        if not self._hidden or self._hidden.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._hidden]

    def _scan(self, matcher: StopStringMatcher, text: str) -> str:
        certain = matcher.push(text, may_stop=self.num_tokens > self._min_tokens)
        self.stopped = matcher.matched
        if self.stopped is not None and self._include_stop:
            certain += self.stopped
        return certain

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


def decode_final(
    tokenizer: PreTrainedTokenizerBase,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Iterable[int] = (),
) -> str:
    """Text of a whole completion, equal to what `IncrementalDetokenizer` returns piece by piece.

    Without stop strings it takes one pass over the tokens. Arguments are those of
    `IncrementalDetokenizer`.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params, eos_token_ids)
    return detokenizer.push(token_ids) + detokenizer.finish()


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Text of one token inside a text, as logprobs show it; U+FFFD for parts of characters."""
    pieces = token_pieces(tokenizer, skip_special_tokens=False)
    if pieces is None:
        return _decode(tokenizer, [token_id], skip_special_tokens=False)
    return pieces[token_id].decode("utf-8", "replace")


def _hidden_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    if params.include_stop_str_in_output:
        return frozenset()
    if params.ignore_eos:
        return params.stop_token_id_set
    return params.stop_token_id_set.union(eos_token_ids)


class _Stream(Protocol):
    """A decoder that keeps its position."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes tokens and returns the complete characters they add."""

    def flush(self) -> str:
        """Ends the text and returns the incomplete rest."""


def _stream(
    tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
) -> _Stream:
    pieces = token_pieces(tokenizer, params.skip_special_tokens)
    if pieces is None:
        return _WindowStream(tokenizer, prompt_token_ids, params.skip_special_tokens)
    return _ByteStream(pieces, prompt_token_ids)


class _ByteStream:
    """Decodes by joining the bytes of tokens."""

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._prompt_token_ids = prompt_token_ids
        self._started = False
        self._decoder = utf8_decoder()

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = [self._pieces[token_id] for token_id in token_ids]
        if not self._started:
            for index, piece in enumerate(pieces):
                if piece:
                    pieces[index] = self._pieces.first(self._prompt_token_ids, token_ids[index])
                    self._started = True
                    break
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes with any tokenizer: what a token adds is the difference it makes to a window.

    The window starts with the tokens of the last text returned, since the text of a token may
    depend on the one before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        visible = [token_id for token_id in prompt_token_ids if token_id not in self._skipped]
        self._window = visible[-_MAX_PENDING_TOKENS:]
        self._mark()

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def flush(self) -> str:
        return self._difference(self._decode_window())

    def _feed_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode_window()
        pending = len(self._window) - self._known_tokens
        # Tokens that never form a valid character would otherwise be held forever.
        if text.endswith(REPLACEMENT) and pending < _MAX_PENDING_TOKENS:
            return ""
        added = self._difference(text)
        if added or pending >= _MAX_PENDING_TOKENS:
            del self._window[: self._known_tokens]
            self._mark()
        return added

    def _mark(self) -> None:
        self._known_tokens = len(self._window)
        self._known_text = self._decode_window()

    def _difference(self, text: str) -> str:
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        # The prompt ended inside a character, shown as U+FFFD until it was completed.
        same = 0
        for old, new in zip(self._known_text, text, strict=False):
            if old != new:
                break
            same += 1
        return text[same:]

    def _decode_window(self) -> str:
        return _decode(self._tokenizer, self._window, skip_special_tokens=False)


def _decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool
) -> str:
    text = tokenizer.decode(
        token_ids,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return cast(str, text)
