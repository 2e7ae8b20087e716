"""Files with a JSON object on every line, as every command reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zipage.errors import ConfigError
from zipage.json_lines import read_json_lines


def test_a_line_ends_with_a_line_feed_only(tmp_path: Path) -> None:
    """JSON strings may hold the characters at which `str.splitlines` also cuts."""
    text = "one\u2028two\u2029three\x85four"
    file = tmp_path / "a.jsonl"
    file.write_bytes(f'{{"a": "{text}"}}\r\n\n {{"a": 2}}'.encode())
    (first, one), (second, two) = read_json_lines("prompts", file)
    assert (one, two) == ({"a": text}, {"a": 2})
    assert first.endswith("line 1") and second.endswith("line 3")
    assert first.startswith(f"prompts={str(file)!r}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n{", "line 2 is not JSON"),
        (b"[1]", "line 1 is not a JSON object"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"a": "\xff"}', "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_json_lines("prompts", file))
