# ruff: noqa: RUF001 - letters that look like others are the point
"""200 texts whose characters are easily broken."""

import random

_EMOJI = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🧑🏿‍🚀",
    "👍🏽",
    "🇫🇷",
    "🇯🇵🇧🇷",
    "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "1️⃣",
    "❤️‍🔥",
    "🙂",
    "🤷🏼‍♀️",
    "☝🏻",
]
_CJK = [
    "機械学習",
    "你好，世界！",
    "한국어를",
    "\u1112\u1161\u11ab",  # Hangul as jamo
    "が\u304b\u3099",  # composed and combining
    "𠮷野家",
    "葛\U000e0100城",  # with a variation selector
    "（推論）",
    "答えは四十二。",
]
_COMBINING = [
    "नमस्ते",
    "क्षत्रिय",
    "اَلْعَرَبِيَّةُ",
    "لا إله",
    "שָׁלוֹם",
    "ภาษาไทยนี้",
    "e\u0301\u0323",
    "n\u0303",
    "Z\u0351\u036b\u0343a\u0334\u0335l\u0320g\u0334o",
    "తెలుగు",
    "\u200f\u202bRTL\u202c",
]
_CODE = [
    "def f(x: int) -> str:\n",
    "    return f'{x!r}' # né\n",
    "\t\tif (a<=b && !c) { d++; }\r\n",
    "```python\n",
    "```\n\n",
    "<|im_end|",
    "</thin",
    "SELECT * FROM t;--",
    "\\boxed{42}",
    "0x1F600 ",
]
_PLAIN = [
    "The answer is 42.",
    " Let me think",
    " step by step, ",
    "  \n\n",
    "naïve coöperate ß",
    "“quoted” — dash…",
    " 12,50 € ",
    "END",
    "Observation:",
    "\u00a0\u200b",
]
_KINDS = [_EMOJI, _CJK, _COMBINING, _CODE, _PLAIN]


def _text(index: int) -> str:
    picks = random.Random(index)
    pieces = _KINDS[index % 6] if index % 6 < 5 else [p for kind in _KINDS for p in kind]
    parts = [picks.choice(pieces)]
    while len("".join(parts)) < 14:
        parts.append(picks.choice(["", " ", "a"]) + picks.choice(pieces))
    return "".join(parts)


TEXTS = [_text(index) for index in range(200)]
