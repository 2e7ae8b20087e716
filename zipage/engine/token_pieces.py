"""The bytes each token adds to a text."""

from __future__ import annotations

import codecs
import json
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""Replaces invalid UTF-8 in a text."""
_MAX_CHARACTER_BYTES = 4


class TokenPieces(dict[int, bytes]):
    """Bytes each token adds inside a text, filled in as tokens appear; b"" for skipped tokens.

    Almost every tokenizer of a generating model (byte-level BPE; SentencePiece models with
    spaces as ``▁`` and bytes as ``<0xE4>``) decodes by joining such pieces. Invalid UTF-8 becomes
    U+FFFD, one for each maximal part of a character (Unicode 3.9, as in Python and tokenizers'
    byte-level decoder).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[str], bytes],
        strips_start: bool,
        skipped: frozenset[int],
    ) -> None:
        super().__init__()
        # The table is cached for the tokenizer's lifetime, so it must not keep the tokenizer alive.
        self._backend = tokenizer.backend_tokenizer
        self._encode = encode
        self._strips_start = strips_start
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        # Ids beyond the tokenizer's vocabulary exist where the model's is padded.
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._encode(token)
        return piece

    def first(self, prompt_token_ids: Sequence[int], token_id: int) -> bytes:
        """Bytes of the first token that has any, given the prompt before it."""
        piece = self[token_id]
        tail = b""
        for before in reversed(prompt_token_ids):
            tail = self[before] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        if not tail:
            return self._at_start(token_id) if self._strips_start else piece
        decoder = utf8_decoder()
        decoder.decode(tail)
        incomplete, _ = decoder.getstate()
        continues = 0x80 <= piece[0] < 0xC0
        return incomplete + piece if incomplete and continues else piece

    def _at_start(self, token_id: int) -> bytes:
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return self[token_id] if REPLACEMENT in text else text.encode()


def utf8_decoder() -> codecs.BufferedIncrementalDecoder:
    """A decoder that waits for whole characters and replaces invalid bytes with U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert isinstance(decoder, codecs.BufferedIncrementalDecoder)
    return decoder


_tables: weakref.WeakKeyDictionary[
    PreTrainedTokenizerBase, tuple[TokenPieces, TokenPieces] | None
] = weakref.WeakKeyDictionary()


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool
) -> TokenPieces | None:
    """The tokenizer's table, or None if it does not decode piece by piece.

    Tables are made once per tokenizer, so tokens must not be added to it afterwards.
    """
    if tokenizer not in _tables:
        form = _piece_form(tokenizer)
        _tables[tokenizer] = form and (
            TokenPieces(tokenizer, *form, skipped=frozenset()),
            TokenPieces(tokenizer, *form, skipped=special_token_ids(tokenizer)),
        )
    tables = _tables[tokenizer]
    return tables and tables[skip_special_tokens]


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that ``skip_special_tokens`` leaves out."""
    return frozenset(
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    )


def _piece_form(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Callable[[str], bytes], bool] | None:
    """How the tokenizer's decoder turns a token into bytes, and whether it strips the start."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python has no state to read
        return None
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _byte_level_piece, False
    if names == ["Metaspace"]:
        space = steps[0]["replacement"]
        return lambda token: token.replace(space, " ").encode(), True
    replacements: list[tuple[str, str]] = []
    while names[:1] == ["Replace"]:
        pattern = steps.pop(0)
        names.pop(0)
        if "String" not in pattern["pattern"]:
            return None
        replacements.append((pattern["pattern"]["String"], pattern["content"]))
    has_bytes = names[:1] == ["ByteFallback"]
    rest = steps[has_bytes:]
    strips = len(rest) == 2 and rest[1]["type"] == "Strip"
    if [step["type"] for step in rest] != ["Fuse", "Strip"][: 1 + strips]:
        return None
    if strips and (rest[1]["start"] > 1 or rest[1]["stop"] > 0):
        return None

    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()

    return piece, strips


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters and their bytes: printable Latin-1, the rest from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token.encode()
