"""Answers of a given form: which tokens may come next, by llguidance's parser.

The parser runs on the host: it has to see a token before it can say what may follow. V token ids.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zipage.engine.token_pieces import special_token_ids, token_pieces
from zipage.errors import RequestError
from zipage.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: Compiled grammars, and refusals, that are kept for the next request.
_MAX_CACHED = 128
#: Most remainders of the `multipleOf`s of a schema. The parser makes a state for each before it
#: answers, which its own limits do not bound: some seconds and gigabytes for a million.
_MAX_REMAINDERS = 100_000
#: What makes one number a multiple of several.
_MERGING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
#: White space between parts of JSON: a space, or a line end and the next line's indentation. Every
#: usual way to write JSON has no more; with any white space, models may go on with it for ever.
_WHITE_SPACE = r" |\r?\n( {0,64}|\t{0,16})"
#: Bytes that occur in UTF-8.
_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}
#: Beginnings of an answer that are tried to find out whether the vocabulary can write any.
_MAX_TRIED = 128
#: Missing characters that are named.
_MAX_NAMED = 3


class GrammarCompiler:
    """Compiles forms for one tokenizer. May be used by several threads at once.

    Args:
        tokenizer: gives the Hugging Face tokenizer; called when the first grammar comes.
        vocab_size: V.
        eos_token_ids: end-of-sequence tokens of the model.
    """

    def __init__(
        self, tokenizer: Callable[[], Any], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._table: Any = None
        #: Every byte is a token of this one.
        self._byte_table: Any = None
        #: Bytes of UTF-8 that no token has.
        self._unknown: frozenset[int] = frozenset()
        self._cache: OrderedDict[tuple[str, str, bool], LLMatcher | RequestError] = OrderedDict()
        self._lock = threading.Lock()
        #: Apart, so that nobody who asks for a known form waits while another is compiled.
        self._compiling = threading.Lock()

    def compile(self, form: StructuredOutputsParams) -> LLMatcher:
        """A parser at the beginning of an answer; not to be moved, but to be copied.

        Takes milliseconds as a rule (the first call also reads the vocabulary), and is bounded:
        the parser refuses grammars that are too large.

        Raises:
            RequestError: the form is not legal, the vocabulary lacks characters that it needs, no
                token can begin such an answer, llguidance is not installed or does not know the
                tokenizer.
        """
        key = (form.kind, form.text, form.disable_any_whitespace)
        found = self._find(key)
        if found is None:
            with self._compiling:
                found = self._find(key)  # somebody else's, meanwhile
                if found is None:
                    try:
                        found = self._compile(form)
                    except RequestError as error:
                        found = error
                    with self._lock:
                        self._cache[key] = found
                        if len(self._cache) > _MAX_CACHED:
                            self._cache.popitem(last=False)
        if isinstance(found, RequestError):
            raise RequestError(str(found))
        return found

    def _find(self, key: tuple[str, str, bool]) -> LLMatcher | RequestError | None:
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
            return found

    def _compile(self, form: StructuredOutputsParams) -> LLMatcher:
        try:
            llguidance: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs the package llguidance: pip install 'zipage[structured]'"
            ) from error
        if self._table is None:
            self._table = self._make_table(llguidance)
        try:
            grammar = _grammar(llguidance, form)
        except ValueError as error:
            raise _refusal(form, str(error)) from None
        matcher = llguidance.LLMatcher(self._table, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(form, _cause(matcher))
        if self._unknown and (missing := self._missing(llguidance, form)):
            raise _unwritable(form, f"no token of its vocabulary has {missing}")
        bits = allowed_tokens([matcher], self._vocab_size)
        if matcher.is_error():
            if _is_dead_end(matcher):
                raise _unwritable(form, "no token of its vocabulary can begin it")
            raise _refusal(form, _cause(matcher))
        if not _any_token(bits[0], self._vocab_size):
            if matcher.is_accepting():
                raise _refusal(form, "only the empty text has it")
            raise _unwritable(form, "no token of its vocabulary can begin it")
        parser: LLMatcher = matcher
        return parser

    def _make_table(self, llguidance: Any) -> Any:
        tokenizer = self._tokenizer()
        pieces = token_pieces(tokenizer, skip_special_tokens=False)
        if pieces is None:
            raise RequestError(
                "structured_outputs is not available: the texts of this model's tokenizer are not "
                "made of one piece for each token"
            )
        special = special_token_ids(tokenizer).union(self._eos_token_ids)
        tokens = [pieces[token_id] for token_id in range(self._vocab_size)]
        known = {byte for i, token in enumerate(tokens) if i not in special for byte in token}
        self._unknown = _UTF8 - known
        if self._unknown:
            self._byte_table = _table(llguidance, [bytes([byte]) for byte in range(256)])
        return _table(llguidance, tokens, special)

    def _missing(self, llguidance: Any, form: StructuredOutputsParams) -> str | None:
        """The characters for want of which no answer can be written; None if there may be one."""
        if form.grammar is not None and "<[" in form.grammar:
            return None  # perhaps tokens by their ids, which would be taken for those of bytes
        # White space changes nothing, and would only be tried in vain.
        grammar = _grammar(llguidance, replace(form, disable_any_whitespace=True))
        begin = llguidance.LLMatcher(self._byte_table, grammar, log_level=0)
        states: list[tuple[LLMatcher, int | None]] = [(begin, None)]
        missing: dict[int, LLMatcher] = {}
        for _ in range(_MAX_TRIED):
            if not states:
                break
            before, byte = states.pop()
            state = before.deep_copy()
            if byte is not None:
                state.consume_token(byte)
            wanted = _allowed_bytes(state)
            if state.is_error() or state.is_accepting():
                return None
            for byte in wanted:
                if byte in self._unknown:
                    missing.setdefault(byte, state)
                else:
                    states.append((state, byte))
        if states or not missing:
            return None
        named = [_character(byte, state) for byte, state in missing.items()][:_MAX_NAMED]
        more = f" or one of {len(missing) - len(named)} others" if len(missing) > len(named) else ""
        needs = "which it needs" if len(missing) == 1 else "one of which it needs"
        return f"{' or '.join(named)}{more}, {needs}"


def schema_fault(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a JSON schema for any tokenizer; None if there is nothing."""
    try:
        llguidance: Any = importlib.import_module("llguidance")
    except ImportError:
        return None  # whoever wants to use it is told
    form = StructuredOutputsParams(json=schema)
    try:
        grammar = _grammar(llguidance, form)
    except ValueError as error:
        return str(error)
    return str(llguidance.LLMatcher.validate_grammar(grammar)) or None


def _grammar(llguidance: Any, form: StructuredOutputsParams) -> str:
    """The form as a grammar in Lark's notation."""
    if form.kind in ("json", "json_object"):
        options = {"whitespace_flexible": not form.disable_any_whitespace}
        made = json.loads(llguidance.LLMatcher.grammar_from_json_schema(form.text, options))
        schema = made["grammars"][0]["json_schema"]
        _check_multiples(schema)
        if schema["x-guidance"].get("whitespace_flexible"):
            schema["x-guidance"].setdefault("whitespace_pattern", _WHITE_SPACE)
        lark = f"start: %json {json.dumps(schema)}"
    elif form.kind == "regex":
        made = json.loads(llguidance.LLMatcher.grammar_from_regex(form.regex))
        lark = made["grammars"][0]["lark_grammar"]
    elif form.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choice)
        lark = f"start: {choices}"
    else:
        lark = llguidance.grammar_from("grammar", form.grammar)
        for found in re.finditer(r"%json\s*", lark):
            # The parser says what is wrong, if anything is.
            with contextlib.suppress(json.JSONDecodeError, RecursionError):
                _check_multiples(json.JSONDecoder().raw_decode(lark, found.end())[0])
    # Otherwise text with one continuation is tokenised anew, which needs a tokenizer that gives
    # the same tokens for a text in the middle of another.
    header = re.search(r"^%llguidance\s+(\{.*\})\s*$", lark, re.MULTILINE)
    if header is None:
        return f'%llguidance {{"no_forcing": true}}\n{lark}'
    merged = json.dumps({**json.loads(header[1]), "no_forcing": True})
    return lark[: header.start(1)] + merged + lark[header.end(1) :]


def _check_multiples(schema: Any) -> None:
    """Raises ValueError if the numbers of a schema have too many remainders to tell apart."""
    divisors: set[int] = set()
    merges = False
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            merges |= not _MERGING.isdisjoint(part)
            value = part.get("multipleOf")
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # Powers of ten are seen from the last digits.
                digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).strip("0")
                divisors.add(int(digits or "1"))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if max(sum(divisors), math.lcm(*divisors) if merges else 0) > _MAX_REMAINDERS:
        raise ValueError(f"its multipleOf have more than {_MAX_REMAINDERS} remainders together")


def _table(llguidance: Any, tokens: Sequence[bytes], special: Collection[int] = ()) -> Any:
    # What ends an answer is decided here, not by the parser: its end token is none of ours.
    vocabulary, end = _Vocabulary(tokens, special), len(tokens)
    return llguidance.LLTokenizer(vocabulary, n_vocab=end + 1, eos_token=end)


def _allowed_bytes(matcher: LLMatcher) -> list[int]:
    """What may come next, where every byte is a token."""
    bits = allowed_tokens([matcher], 256)
    return [
        int(byte)
        for byte in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:256])
    ]


def _character(byte: int, before: LLMatcher) -> str:
    """How a character is named, by its first byte and the parser before it."""
    character, after = bytes([byte]), before.deep_copy()
    after.consume_token(byte)
    while True:
        try:
            return repr(character.decode())
        except UnicodeDecodeError:
            following = _allowed_bytes(after)
            if len(following) != 1 or not after.consume_token(following[0]):
                return f"a character whose UTF-8 begins with {character.hex()}"
            character += bytes(following)


class _Vocabulary:
    """The tokens' bytes, in the form llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Collection[int]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)
        self.special_token_ids = sorted({*special, len(tokens)})

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text; not asked for without forcing."""
        return []


class AnswerForm:
    """The form of one answer, and how far it has got. It follows the answer's tokens.

    End-of-sequence and stop tokens are no part of the form: they are possible where the form is
    satisfied, and nowhere else. Where nothing else is possible they are in spite of ``min_tokens``
    and ``ignore_eos``.

    Args:
        matcher: a compiled form.
        form: what it was compiled from.
        output_token_ids: tokens generated so far; kept by reference, the engine appends to it.
        end_token_ids: tokens that end the answer.
        barred_token_ids: end-of-sequence tokens that do not (``ignore_eos``).
        min_tokens: before so many tokens the answer ends only where nothing else is possible.

    Attributes:
        ended: whether a token has ended the answer, if need be against `min_tokens` and
            ``ignore_eos``: then the form had no other one.
        fault: why no further token can be chosen; None while there is nothing wrong.
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
        """Takes in the tokens that were generated since the last call."""
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
                self.fault = f"structured_outputs: {_cause(self.matcher)}"

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
        """Brings a row of `allowed_tokens` in line with what ends the answer."""
        if not self._reasons and self.fault is None and self.matcher.is_error():
            dead = _is_dead_end(self.matcher)
            self.fault = self._dead_end() if dead else f"structured_outputs: {_cause(self.matcher)}"
        if self.complete or self.fault is not None:
            bits[:] = -1  # the answer has ended: nobody reads its next token
            return
        _set_bits(bits, self._never, False)
        if self.parses and self.matcher.is_accepting():
            if self._read >= self._min_tokens:
                _set_bits(bits, self._ends, True)
            if not _any_token(bits, vocab_size):
                _set_bits(bits, self._never, True)  # the form comes first
        if not _any_token(bits, vocab_size):
            self.fault = self._dead_end()
            bits[:] = -1

    def _dead_end(self) -> str:
        """Says that no token is possible, and what would be."""
        matcher = self._begin.deep_copy()  # the other one has failed
        read = self._output[self._begun : self._read]
        matcher.consume_tokens([token_id for token_id in read if token_id not in self._end_set])
        fault = "structured_outputs: no token of the vocabulary can continue the answer"
        if needed := matcher.compute_ff_bytes():
            fault += f", which must go on with {needed.decode(errors='replace')!r}"
        return fault


def allowed_tokens(matchers: Sequence[LLMatcher], vocab_size: int) -> npt.NDArray[np.int32]:
    """What the parsers allow next: ``[R, W]``, bit ``v % 32`` of word ``v // 32`` for token v."""
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


def _any_token(bits: npt.NDArray[np.int32], vocab_size: int) -> bool:
    """Whether any token but the parser's own end is allowed."""
    last = int(bits[-1]) & ((1 << vocab_size % 32) - 1)
    return bool(last) or bool(bits[:-1].any())


def _cause(matcher: LLMatcher) -> str:
    message: str = matcher.get_error().split("\n<state>")[0].strip()
    return "no token can go on with it" if _is_dead_end(matcher) else message


def _is_dead_end(matcher: LLMatcher) -> bool:
    return matcher.get_error().startswith("NoExtension")


def _unwritable(form: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{form.kind} cannot be written by this model: {reason}")


def _refusal(form: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{form.kind} is not legal: {reason}")
