# ruff: noqa: RUF001 - letters that look like others are the point
"""Small tokenizers of every decoding form, trained on the spot, and texts to feed them."""

import random
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import zipage

ZIPAGE_TINY = Path(zipage.__file__).parent / "assets" / "zipage-tiny"

CORPUS = [
    "The quick brown fox jumps over the lazy dog.  Two spaces, then a tab\tand\na new line.",
    "Réponse: l'été à Zürich coûte 12,50 €. Straße, naïve, coöperate.",
    "機械学習のモデルは長い推論をする。你好，世界！",
    "def f(x):\n    return x ** 2  # a comment\n\n\nprint(f(3))",
    "Let me think step by step. 17 + 25 = 42, so the answer is \\boxed{42}.",
] * 4

PIECES = [
    *"abcXYZ 0123456789.,!?\n\t",
    " the",
    " think",
    "  ",
    "answer",
    " \\boxed{",
    "}",
    "é",
    "e\u0301",
    "n\u0303\u0323",
    "ß",
    "你好",
    "世界",
    "推論",
    "한국어",
    "🙂",
    "👩‍👩‍👧",
    "🇫🇷",
    "👍🏽",
    "𝔘𝔫𝔦",
    "\u200b",
    "ا لعربية",
    "नमस्ते",
    "END",
    "</think>",
    "\ufffd",
]

SPECIALS = ["<s>", "</s>", "<unk>"]


def random_text(picks: random.Random, pieces: int = 20) -> str:
    """Text of ASCII, accents, CJK, combining marks and emoji in random order."""
    return "".join(picks.choices(PIECES, k=pieces))


def _byte_level() -> Tokenizer:
    """Byte-level BPE, as in Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_level_unusual() -> Tokenizer:
    """The same with a decoder written in a form that is not recognised."""
    tokenizer = _byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def _unigram(normalizer: normalizers.Normalizer, *decoding: decoders.Decoder) -> Tokenizer:
    """SentencePiece's unigram model with bytes for unknown characters."""
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", show_progress=False)
    ascii_corpus = ["".join(c for c in text if ord(c) < 128) for text in CORPUS]
    learner.train_from_iterator(ascii_corpus, trainer)
    words = [(word, -8.0) for word in sorted(learner.get_vocab()) if word not in ("<unk>", "▁")]
    byte_tokens = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary = [("<unk>", 0.0), ("▁", -6.0), ("▁▁", -7.0), *words, *byte_tokens]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(list(decoding))
    return tokenizer


def _llama() -> Tokenizer:
    """As in Llama 2: a space before the text, taken away again when decoding."""
    return _unigram(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )


def _gemma() -> Tokenizer:
    """As in Gemma: no space is added."""
    return _unigram(
        normalizers.Replace(" ", "▁"),
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    )


def _metaspace() -> Tokenizer:
    """A unigram model with the Metaspace decoder; unknown characters are lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    """WordPiece, where the text of a token depends on its place."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


_MAKERS = {
    "byte_level": _byte_level,
    "byte_level_unusual": _byte_level_unusual,
    "llama": _llama,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "word_piece": _word_piece,
}
FORMS = [*_MAKERS, "zipage_tiny"]


@cache
def make_tokenizer(form: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of `FORMS`, with special tokens and an ordinary added one."""
    if form == "zipage_tiny":
        return AutoTokenizer.from_pretrained(ZIPAGE_TINY)
    tokenizer = _MAKERS[form]()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encode(form: str, text: str) -> list[int]:
    """Token ids of a text without the special tokens around it."""
    return make_tokenizer(form).encode(text, add_special_tokens=False)


def decode(form: str, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """What the tokenizers library makes of the tokens."""
    return make_tokenizer(form).backend_tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens
    )
