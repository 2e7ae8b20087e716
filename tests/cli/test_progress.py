"""The live view on stderr."""

import io
from dataclasses import replace

import pytest

from zipage.cli.progress import EngineProgress
from zipage.engine.stats import EngineStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STATS = EngineStats(
    running=3,
    waiting=2,
    blocks_total=64,
    blocks_owned=17,
    generated_tokens=100,
    compressions=5,
    preemptions_recompute=1,
)


def test_a_terminal_sees_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with EngineProgress(8) as progress:
        assert progress.due
        progress.update(STATS, 4)
        assert not progress.due, "the next one must wait"
    shown = terminal.getvalue()
    for words in ("4/8", "running 3, waiting 2", "17/64", "compressions 5, preemptions 1"):
        assert words in shown


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with EngineProgress(8) as progress:
        assert not progress.due
        progress.update(STATS, 4)
        progress.pause()
        progress.resume()
    assert file.getvalue() == ""


def test_a_file_gets_a_line_every_ten_seconds_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = io.StringIO(), [100.0]
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with EngineProgress(8, "requests", lines=True) as progress:
        for second in range(26):
            now[0] = 100.0 + second
            if progress.due:
                tokens = 100 + 50 * second + 500 * max(0, second - 10)
                progress.update(replace(STATS, generated_tokens=tokens), second // 10)
    assert file.getvalue().splitlines() == [
        "1 requests of 8, 500 tokens, 50 tokens/s, running 3, waiting 2",
        "2 requests of 8, 6,000 tokens, 550 tokens/s, running 3, waiting 2",
    ]


def test_a_terminal_gets_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with EngineProgress(8, lines=True) as progress:
        assert not progress._lines
    monkeypatch.setattr("sys.stderr", None)
    assert not EngineProgress(8, lines=True).due


def test_the_rate_is_that_of_the_last_seconds() -> None:
    progress = EngineProgress(8)
    rates = [progress._rate(second, 100 * second * (second > 10)) for second in range(20)]
    assert rates[5] == 0
    assert rates[19] == pytest.approx(100)
