"""Tables of the command line, in narrow terminals and in files."""

import re

import pytest

from zipage.cli.tables import print_table

ROWS = [
    ["policy", "budget", *(f"measurement {i}" for i in range(9))],
    ["zipage", "1,024", *(f"{i},234.5 (9{i} %)" for i in range(9))],
    ["streaming with a long name", "512", "failed"],
]


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [60, 80, 400])
def test_nothing_is_shortened_in_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(ROWS, keys=2, title="Cells")
    text = printed(capsys)
    assert all(len(line) <= columns for line in text.splitlines())
    parts = text.count("streaming with a long name")
    assert parts == text.count("Cells") == text.count("1,024")
    assert (parts == 1) == (columns == 400)
    assert all(text.count(cell) == 1 for row in ROWS for cell in row[2:])


def test_a_file_gets_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_table(ROWS, keys=2)
    (line,) = (line for line in printed(capsys).splitlines() if "1,024" in line)
    assert all(cell in line for cell in ROWS[1])


def test_a_column_wider_than_the_terminal_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table([["", "a"], ["label", "x" * 40]])
    assert "x" * 40 in printed(capsys)
