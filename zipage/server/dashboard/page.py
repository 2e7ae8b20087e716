"""The dashboard's page: one document with style and script inlined."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("charts.js", "live.js", "retention.js", "main.js")


@dataclass(frozen=True)
class Page:
    """The document and its security policy.

    Attributes:
        html: the document.
        policy: its Content-Security-Policy: only this style, this script and this server's data.
    """

    html: bytes
    policy: str


def load_page() -> Page:
    """Put the page together."""
    style = (_FOLDER / "style.css").read_text(encoding="utf-8")
    # One function, so that the page defines no global names.
    sources = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{sources}\n}})();\n'
    html = (_FOLDER / "index.html").read_text(encoding="utf-8")
    html = html.replace("<style></style>", f"<style>{style}</style>", 1)
    html = html.replace("<script></script>", f"<script>{script}</script>", 1)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
