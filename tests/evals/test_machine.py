"""What is found out about the machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from zipage.evals import machine


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ((0, 0, 0, 400, 0, 0, 0, 0), 4),
        ((10, 0, 10, 370, 10, 0, 0, 0), 4),
        ((200, 0, 0, 200, 0, 0, 0, 0), 2),
        ((40, 50, 30, 100, 60, 10, 10, 100), 2),  # waiting for a disk is idle, stolen time is not
        ((300, 0, 100, 0, 0, 0, 0, 0), 1),
        ((0, 0, 0, 0, 0, 0, 0, 0), 4),
    ],
)
def test_threads_for_idle_cores(
    ticks: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 100 900 10 0 0 0 7 0\ncpu0 1 2 3\n")

    def pass_time(seconds: float) -> None:
        then = (100, 0, 100, 900, 10, 0, 0, 0)
        now = [a + b for a, b in zip(then, ticks, strict=True)]
        stat.write_text(f"cpu {' '.join(map(str, now))} 9 0\n")

    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(time, "sleep", pass_time)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert machine.idle_threads() == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert machine.idle_threads() <= 2


@pytest.mark.parametrize("content", [None, "", "cpu one two"])
def test_systems_that_do_not_say(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert machine.idle_threads(0.0) == 3
