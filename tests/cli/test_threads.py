"""How many OpenMP threads compute in the commands, and how they wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from zipage import ConfigError
from zipage.cli import threads

SHOW = """
import os, sys
from zipage.cli import app
assert "torch" not in sys.modules, "OpenMP has read its variables already"
app(["info"], standalone_mode=False)
print("spins", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_briefly_unless_the_user_chose(chosen: dict[str, str], expected: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    told = subprocess.run(
        [sys.executable, "-c", SHOW],
        env=environment | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"spins {expected}" in told.stdout


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /proc/stat of a machine with four CPUs of four cores, all of them allowed."""
    stat = tmp_path / "stat"
    stat.write_text(content([]))
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu}\n")
    monkeypatch.setattr(threads, "_STAT", stat)
    monkeypatch.setattr(threads, "_CORES", tmp_path)
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # whatever is set is undone behind the test
    monkeypatch.delenv("OMP_NUM_THREADS")
    return stat


def content(ticks: Sequence[tuple[int, ...]]) -> str:
    """/proc/stat after the first CPUs had these ticks, and the others none."""
    then = (100, 0, 100, 900, 10, 0, 0, 0)
    given = [*ticks, (), (), (), ()][:4]
    now = [[a + b for a, b in zip_longest(then, cpu, fillvalue=0)] for cpu in given]
    lines = [f"cpu{number} {' '.join(map(str, cpu))} 9 0" for number, cpu in enumerate(now)]
    total = [sum(ticks) for ticks in zip(*now, strict=True)]
    return "\n".join([f"cpu {' '.join(map(str, total))} 36 0", *lines, "ctxt 5"])


def pass_time(stat: Path, monkeypatch: pytest.MonkeyPatch, *ticks: tuple[int, ...]) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(content(ticks)))


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ((0, 0, 0, 400, 0, 0, 0, 0), None),
        ((10, 0, 10, 370, 10, 0, 0, 0), None),
        ((90, 0, 10, 300, 0, 0, 0, 0), "3"),
        ((40, 50, 30, 100, 60, 10, 10, 100), "2"),  # waiting for a disk is idle, stolen time is not
        ((300, 0, 100, 0, 0, 0, 0, 0), "1"),
        ((0, 0, 0, 0, 0, 0, 0, 0), None),
    ],
)
def test_idle_cores_compute(
    ticks: tuple[int, ...],
    expected: str | None,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[int, str]] = []
    monkeypatch.setattr(
        threads.logger, "log", lambda level, text, *values: logged.append((level, text % values))
    )
    pass_time(machine, monkeypatch, ticks)
    threads.use_idle_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected
    warned = [message for level, message in logged if level == logging.WARNING]
    assert len(warned) == (expected in ("1", "2"))
    assert all(f"{expected} of 4 threads" in message for message in warned)


def test_no_more_threads_than_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        file = machine.parent / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        file.write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(threads.logger, "log", None)  # these are all that torch would take
    pass_time(machine, monkeypatch, (100, 0, 0, 300, 0, 0, 0, 0))
    threads.use_idle_cores()
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("allowed", "expected"), [({0, 1}, "1"), ({1, 2}, None)])
def test_only_cpus_that_may_be_used_count(
    allowed: set[int],
    expected: str | None,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed)
    pass_time(machine, monkeypatch, (100, 0, 0, 0), (0, 0, 0, 100), (0, 0, 0, 100), (100, 0, 0, 0))
    threads.use_idle_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, "2"),
        ({"cpu.max": "50000 100000\n"}, "1"),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3"),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "900000 100000\n"}, None),
    ],
)
def test_the_limit_of_a_container(
    files: dict[str, str], expected: str | None, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.parent / "cpu").mkdir()
    for name, text in files.items():
        (machine.parent / name).write_text(text)
    monkeypatch.setattr(threads.logger, "log", None)  # no other program is to blame
    pass_time(machine, monkeypatch, *[(0, 0, 0, 100)] * 4)
    threads.use_idle_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_a_container_that_numbers_its_cpus_anew(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {12, 13, 14, 15})
    monkeypatch.setattr(threads, "_physical_cores", len)
    pass_time(machine, monkeypatch, (100, 0, 0, 300, 0, 0, 0, 0))
    threads.use_idle_cores()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_an_empty_variable_is_not_set(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    pass_time(machine, monkeypatch, (400, 0, 0, 0, 0, 0, 0, 0))
    threads.use_idle_cores()
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("text", [None, "", "cpu0 one two", "cpu7 1 2 3 4 5 6 7 8"])
def test_systems_that_do_not_say(
    text: str | None, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.unlink()
    if text is not None:
        machine.write_text(text)
    threads.use_idle_cores()
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_user_decides(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_time(machine, monkeypatch, (400, 0, 0, 0, 0, 0, 0, 0))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads.use_idle_cores()
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("bench", "bench offline"),
        ("bench_ablation", "bench ablation"),
        ("demo", "demo"),
        ("eval", "eval"),
        ("generate", "generate hi"),
        ("serve", "serve"),
    ],
)
def test_every_command_that_runs_an_engine(
    module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called() -> None:
        raise ConfigError("called")

    monkeypatch.setattr(f"zipage.cli.{module}.use_idle_cores", called)
    assert "called" in invoke(*command.split()).stderr
