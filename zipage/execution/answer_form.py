"""Which tokens may come next in an answer of a given form, according to llguidance's parser.

The parser runs on the host: it must see a token before it can tell what may follow. V token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zipage.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


class AnswerForm:
    """The form of one answer, and the parser's progress through the answer's tokens.

    End-of-sequence and stop tokens are not part of the form: they are allowed only where the form
    is satisfied. Where nothing else is possible, they are allowed in spite of ``min_tokens`` and
    ``ignore_eos``.

    Args:
        matcher: a compiled form.
        form: what it was compiled from.
        output_token_ids: tokens generated so far; kept by reference, the engine appends to it.
        end_token_ids: tokens that end the answer.
        barred_token_ids: end-of-sequence tokens that do not end it (``ignore_eos``).
        min_tokens: with fewer tokens the answer ends only where nothing else is possible.

    Attributes:
        ended: whether a token has ended the answer, possibly against `min_tokens` or
            ``ignore_eos`` because the form allowed no other token.
        fault: why no further token can be chosen; None if one can.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        form: StructuredOutputsParams,
        output_token_ids: Sequence[int],
        end_token_ids: Collection[int],
        barred_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._begin, self._begun = matcher, 0
        self.matcher = matcher.deep_copy()
        self.fault: str | None = None
        self._output = output_token_ids
        self.ended = False
        self._read = 0
        self._min_tokens = min_tokens
        self._ends = np.array(sorted(end_token_ids), dtype=np.int64)
        self._never = np.array(sorted({*barred_token_ids, *end_token_ids}), dtype=np.int64)
        self._reasoning_end = list(form.reasoning_end_token_ids or ())
        self._reasons = bool(self._reasoning_end)
        self._end_set = frozenset(self._never.tolist())

    def advance(self) -> None:
        """Takes the tokens generated since the last call."""
        while self._read < len(self._output) and self.fault is None:
            token_id = self._output[self._read]
            self._read += 1
            if self._reasons:
                start = max(0, self._read - len(self._reasoning_end))
                self._reasons = self._output[start : self._read] != self._reasoning_end
                self._begun = self._read
            elif token_id in self._end_set:
                self.ended = True
            elif not self.matcher.consume_token(token_id):
                self.fault = f"structured_outputs: {cause_of(self.matcher)}"

    @property
    def complete(self) -> bool:
        """Whether nothing can be added."""
        stops = self.ended or self.matcher.is_stopped()
        return not self._reasons and self.fault is None and stops

    @property
    def parses(self) -> bool:
        """Whether the parser decides what comes next."""
        return not (self._reasons or self.fault is not None or self.complete)

    def finish_bits(self, bits: npt.NDArray[np.int32], vocab_size: int) -> None:
        """Allows or bars the tokens that end the answer in a row of `allowed_tokens`."""
        if not self._reasons and self.fault is None and self.matcher.is_error():
            cause = f"structured_outputs: {cause_of(self.matcher)}"
            self.fault = self._dead_end() if is_dead_end(self.matcher) else cause
        if self.complete or self.fault is not None:
            bits[:] = -1  # the answer has ended: its next token is not read
            return
        _set_bits(bits, self._never, False)
        if self.parses and self.matcher.is_accepting():
            if self._read >= self._min_tokens:
                _set_bits(bits, self._ends, True)
            if not any_token(bits, vocab_size):
                _set_bits(bits, self._never, True)  # the form takes precedence
        if not any_token(bits, vocab_size):
            self.fault = self._dead_end()
            bits[:] = -1

    def _dead_end(self) -> str:
        """Explains that no token is possible, and which text would be."""
        matcher = self._begin.deep_copy()  # the other one has failed
        read = self._output[self._begun : self._read]
        matcher.consume_tokens([token_id for token_id in read if token_id not in self._end_set])
        fault = "structured_outputs: no token of the vocabulary can continue the answer"
        if needed := matcher.compute_ff_bytes():
            fault += f", which must go on with {needed.decode(errors='replace')!r}"
        return fault


def allowed_tokens(matchers: Sequence[LLMatcher], vocab_size: int) -> npt.NDArray[np.int32]:
    """Tokens the parsers allow next: ``[R, W]``, bit ``v % 32`` of word ``v // 32`` for token v."""
    from llguidance.numpy import fill_next_token_bitmask

    bits = np.full((len(matchers), vocab_size // 32 + 1), -1, dtype=np.int32)
    for row, matcher in enumerate(matchers):
        fill_next_token_bitmask(matcher, bits, row)
    return bits


def allowed_bits(forms: Sequence[AnswerForm], vocab_size: int) -> npt.NDArray[np.int32]:
    """Tokens that may come next in each answer, as `allowed_tokens` packs them."""
    bits = np.full((len(forms), vocab_size // 32 + 1), -1, dtype=np.int32)
    for form in forms:
        form.advance()
    parsing = [row for row, form in enumerate(forms) if form.parses]
    if parsing:
        bits[parsing] = allowed_tokens([forms[row].matcher for row in parsing], vocab_size)
    for form, row in zip(forms, bits, strict=True):
        form.finish_bits(row, vocab_size)
    return bits


def _set_bits(bits: npt.NDArray[np.int32], ids: npt.NDArray[np.int64], value: bool) -> None:
    words = bits.view(np.uint32)
    flags = np.left_shift(1, ids & 31).astype(np.uint32)
    if value:
        np.bitwise_or.at(words, ids >> 5, flags)
    else:
        np.bitwise_and.at(words, ids >> 5, ~flags)


def any_token(bits: npt.NDArray[np.int32], vocab_size: int) -> bool:
    """Whether any token other than the parser's own end token is allowed."""
    last = int(bits[-1]) & ((1 << vocab_size % 32) - 1)
    return bool(last) or bool(bits[:-1].any())


def cause_of(matcher: LLMatcher) -> str:
    """Why a parser has failed."""
    message: str = matcher.get_error().split("\n<state>")[0].strip()
    return "no token can continue it" if is_dead_end(matcher) else message


def is_dead_end(matcher: LLMatcher) -> bool:
    """Whether a parser failed because the vocabulary cannot write what the form demands."""
    return matcher.get_error().startswith("NoExtension")
