"""Outputs that can't be written: a full disk, a closed stream."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import typer


def check_writable(
    option: str, path: Path | None, others: Mapping[str, Path | None] | None = None
) -> None:
    """Check before any work is done that its results can be written. Creates nothing.

    Args:
        option: the option that names the file.
        path: the file; None if the option is not given.
        others: files of other options, which the results must not overwrite.

    Raises:
        typer.BadParameter: it is a folder, its folder does not exist, it may not be written, or it
            is the file of another option.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            cause = "it is a folder"
        elif not path.parent.is_dir():
            cause = f"there is no folder {str(path.parent)!r}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            cause = "that is not permitted"
        elif (same := _option_of(path, others or {})) is not None:
            cause = f"it is the file of {same}"
        else:
            return
    except OSError as error:  # a folder that may not be searched, a name that is too long
        cause = str(error.strerror)
    raise typer.BadParameter(f"{str(path)!r} can't be written: {cause}", param_hint=option)


def _option_of(path: Path, others: Mapping[str, Path | None]) -> str | None:
    if path.exists() and not path.is_file():  # /dev/null
        return None
    file = path.resolve()
    return next((o for o, other in others.items() if other and other.resolve() == file), None)


def write_json(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write results as JSON if `path` is given; see `writing`."""
    if path is not None:
        write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text to a file; see `writing`."""
    with writing(str(path)):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Exit with one line and code 1 if writing inside the block fails.

    Args:
        what: what is written, for the message.
        stream: where it is written. Nothing reaches it after a failure.
    """
    try:
        yield
    except BrokenPipeError:  # the reader has enough: typer exits silently
        raise
    except OSError as error:
        if stream is not None:
            _discard(stream)
        message = f"Error: {what} can't be written: {error}"
        typer.secho(message, fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def _discard(stream: TextIO) -> None:
    """Redirect a stream to nowhere: closing it would fail again on its buffer."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
