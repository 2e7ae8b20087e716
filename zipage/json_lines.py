"""Files with a JSON object on every line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zipage.errors import ConfigError


def read_json_lines(
    option: str, path: str | os.PathLike[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its location for error messages.

    Empty lines are skipped. A line ends with a line feed only, not with the other characters that
    `str.splitlines` splits at, which JSON allows in strings.

    Args:
        option: the option that names the file.
        path: the file, UTF-8.

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    name = f"{option}={os.fspath(path)!r}"
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is not a JSON object")
        yield where, record
