"""Tables that may be wider than the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

#: Wider than any table.
_UNBOUNDED = 10_000


def print_table(
    rows: Sequence[Sequence[str]], keys: int = 1, title: str = "", frame: box.Box = box.SIMPLE_HEAD
) -> None:
    """Print a table to standard output without shortening its cells.

    If it is wider than the terminal, columns move to further tables below the first, each of
    which repeats the key columns. A file gets a single table.

    Args:
        rows: the first is the heading; shorter rows are padded with empty cells.
        keys: how many columns identify a row.
        title: printed above the table.
        frame: style of the table's lines.
    """
    console = Console()
    limit = console.width if console.is_terminal else _UNBOUNDED
    first, last = keys, len(rows[0])
    while first < last:
        end = first + 1
        while end < last and _width(_table(rows, keys, first, end + 1, title, frame)) <= limit:
            end += 1
        table = _table(rows, keys, first, end, title, frame)
        Console(width=max(console.width, _width(table))).print(table)
        first = end


def _table(
    rows: Sequence[Sequence[str]], keys: int, first: int, end: int, title: str, frame: box.Box
) -> Table:
    table = Table(title=title or None, title_justify="left", box=frame)
    for i in (*range(keys), *range(first, end)):
        table.add_column(rows[0][i], justify="right" if i else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row[:keys], *row[first:end])
    return table


def _width(table: Table) -> int:
    """Terminal columns that the table needs."""
    return Console(width=_UNBOUNDED).measure(table).maximum
