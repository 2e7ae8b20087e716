"""Forms of answers, compiled for a tokenizer by llguidance. V token ids."""

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

from zipage.engine.token_pieces import special_token_ids, token_pieces
from zipage.errors import RequestError
from zipage.execution.answer_form import allowed_tokens, any_token, cause_of, is_dead_end
from zipage.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: Compiled grammars, and refusals, kept for later requests.
_MAX_CACHED = 128
#: Most remainders of a schema's `multipleOf`s together. The parser makes a state for each, which
#: its own limits do not bound: a million take some seconds and gigabytes.
_MAX_REMAINDERS = 100_000
#: Keywords that can make one number a multiple of several.
_MERGING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
#: Whitespace between parts of JSON: a space, or a newline and the next line's indentation. Usual
#: JSON has no more; with unlimited whitespace, models may generate it forever.
_WHITE_SPACE = r" |\r?\n( {0,64}|\t{0,16})"
#: Bytes that can occur in UTF-8.
_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}
#: Most beginnings of an answer tried to find one that the vocabulary can write.
_MAX_TRIED = 128
#: Most missing characters that an error names.
_MAX_NAMED = 3


class GrammarCompiler:
    """Compiles forms for one tokenizer. May be used by several threads at once.

    Args:
        tokenizer: returns the Hugging Face tokenizer; called for the first grammar.
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
        #: A vocabulary in which every byte is a token.
        self._byte_table: Any = None
        #: Bytes of UTF-8 that occur in no token.
        self._unknown: frozenset[int] = frozenset()
        self._cache: OrderedDict[tuple[str, str, bool], LLMatcher | RequestError] = OrderedDict()
        self._lock = threading.Lock()
        #: A lock of its own, so that requests for known forms do not wait for a compilation.
        self._compiling = threading.Lock()

    def compile(self, form: StructuredOutputsParams) -> LLMatcher:
        """A parser at the beginning of an answer; shared, so copy it before advancing it.

        Usually takes milliseconds (the first call also reads the vocabulary), and is bounded:
        the parser refuses grammars that are too large.

        Raises:
            RequestError: the form is not legal, the vocabulary lacks characters that it needs, no
                token can begin such an answer, or llguidance is not installed or does not support
                the tokenizer.
        """
        key = (form.kind, form.text, form.disable_any_whitespace)
        found = self._find(key)
        if found is None:
            with self._compiling:
                found = self._find(key)  # another thread may have compiled it meanwhile
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
            raise _refusal(form, cause_of(matcher))
        if self._unknown and (missing := self._missing(llguidance, form)):
            raise _unwritable(form, f"no token of its vocabulary has {missing}")
        bits = allowed_tokens([matcher], self._vocab_size)
        if matcher.is_error():
            if is_dead_end(matcher):
                raise _unwritable(form, "no token of its vocabulary can begin it")
            raise _refusal(form, cause_of(matcher))
        if not any_token(bits[0], self._vocab_size):
            if matcher.is_accepting():
                raise _refusal(form, "only the empty text matches it")
            raise _unwritable(form, "no token of its vocabulary can begin it")
        parser: LLMatcher = matcher
        return parser

    def _make_table(self, llguidance: Any) -> Any:
        tokenizer = self._tokenizer()
        pieces = token_pieces(tokenizer, skip_special_tokens=False)
        if pieces is None:
            raise RequestError(
                "structured_outputs is not available: this model's tokenizer does not decode to "
                "one piece of text per token"
            )
        special = special_token_ids(tokenizer).union(self._eos_token_ids)
        tokens = [pieces[token_id] for token_id in range(self._vocab_size)]
        known = {byte for i, token in enumerate(tokens) if i not in special for byte in token}
        self._unknown = _UTF8 - known
        if self._unknown:
            self._byte_table = _table(llguidance, [bytes([byte]) for byte in range(256)])
        return _table(llguidance, tokens, special)

    def _missing(self, llguidance: Any, form: StructuredOutputsParams) -> str | None:
        """The missing characters without which no answer can be written; None if one may be."""
        if form.grammar is not None and "<[" in form.grammar:
            return None  # may name tokens by id, which would be mistaken for bytes
        # Whitespace makes no difference here, and trying it would be wasted.
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
    """What is wrong with a JSON schema whatever the tokenizer; None if nothing is."""
    try:
        llguidance: Any = importlib.import_module("llguidance")
    except ImportError:
        return None  # reported when a form is compiled
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
            # The parser reports what is wrong, if anything.
            with contextlib.suppress(json.JSONDecodeError, RecursionError):
                _check_multiples(json.JSONDecoder().raw_decode(lark, found.end())[0])
    # Otherwise llguidance tokenises forced text itself, which needs a tokenizer that gives the
    # same tokens for a text in the middle of another.
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
                # Powers of ten only need the last digits.
                digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).strip("0")
                divisors.add(int(digits or "1"))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if max(sum(divisors), math.lcm(*divisors) if merges else 0) > _MAX_REMAINDERS:
        raise ValueError(f"its multipleOf have more than {_MAX_REMAINDERS} remainders together")


def _table(llguidance: Any, tokens: Sequence[bytes], special: Collection[int] = ()) -> Any:
    # Zipage decides what ends an answer, not the parser: its end token is outside our vocabulary.
    vocabulary, end = _Vocabulary(tokens, special), len(tokens)
    return llguidance.LLTokenizer(vocabulary, n_vocab=end + 1, eos_token=end)


def _allowed_bytes(matcher: LLMatcher) -> list[int]:
    """Bytes that may come next in a parser whose tokens are the bytes."""
    bits = allowed_tokens([matcher], 256)
    return [
        int(byte)
        for byte in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:256])
    ]


def _character(byte: int, before: LLMatcher) -> str:
    """Names a character for a message, by its first byte and the parser before it."""
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
        """Tokens of a text; never called without forcing."""
        return []


def _unwritable(form: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{form.kind} cannot be written by this model: {reason}")


def _refusal(form: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{form.kind} is not legal: {reason}")
