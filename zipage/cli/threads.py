"""How many OpenMP threads compute, and how they wait. OpenMP reads this when torch is imported."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_STAT = Path("/proc/stat")
_CORES = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
#: Seconds for which the cores are watched: 20 of the kernel's ticks for each.
_WATCH = 0.2


def spin_briefly() -> None:
    """Make waiting OpenMP threads give up their core soon, unless the user has set this.

    By default GNU OpenMP spins for milliseconds, and where other programs compete for the cores,
    this takes a core from the very thread that is waited for. Not spinning at all would be 50 %
    slower: a step has hundreds of short waits.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def use_idle_cores() -> None:
    """Compute on the cores that are idle now, unless the user has set OMP_NUM_THREADS.

    A thread that waits for a core stops all others, hundreds of times per step: on two cores of
    which another program uses one, one thread is ten times as fast as two. A container's limit of
    CPU time counts like cores that are not there. On an idle machine nothing is set.
    """
    # An unset variable in a compose file gives an empty one, which OpenMP ignores.
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return
    cpus = os.sched_getaffinity(0)
    idle, allowed = _idle_cpus(cpus, _WATCH), _allowed_cpus()
    usable = min(len(cpus) if idle is None else idle, allowed)
    if usable >= len(cpus):
        return
    cores = min(_physical_cores(cpus), allowed)
    threads = max(1, min(usable, cores))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads < cores:
        logger.log(
            logging.WARNING if 2 * threads <= cores else logging.INFO,
            "other programs use the processor: %d of %d threads (OMP_NUM_THREADS overrides this)",
            threads,
            cores,
        )


def _idle_cpus(cpus: set[int], seconds: float) -> int | None:
    """How many of these logical CPUs nothing uses, rounded; None if the system doesn't say."""
    before = _cpu_times(cpus)
    time.sleep(seconds)
    total, idle = (after - then for after, then in zip(_cpu_times(cpus), before, strict=True))
    return None if total <= 0 else round(idle / total * len(cpus))


def _cpu_times(cpus: set[int]) -> tuple[int, int]:
    """Ticks of these CPUs since boot, and the idle ones of these; zeros if that is not known."""
    names, times = {f"cpu{cpu}" for cpu in cpus}, {}
    try:
        for line in _STAT.read_text().splitlines():
            if line.startswith("cpu"):
                # user, nice, system, idle, iowait, irq, softirq, steal; then guests, part of user.
                name, *words = line.split()[:9]
                times[name] = [int(word) for word in words]
        # Some containers show their own CPUs, under other numbers.
        found = [times[name] for name in (names if names <= times.keys() else ("cpu",))]
        return sum(map(sum, found)), sum(one[3] + one[4] for one in found)
    except (OSError, ValueError, LookupError):
        return 0, 0


def _allowed_cpus() -> int:
    """CPUs whose whole time a container may use: its quota for a period, of either version."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((_CGROUP / file).read_text() for file in files).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # "max" is no limit, and so is -1
            continue
        if quota > 0 and period > 0:
            return max(1, quota // period)
    return sys.maxsize


def _physical_cores(cpus: set[int]) -> int:
    """Cores to which these logical CPUs belong, as torch takes no more threads than that."""
    try:
        siblings = {
            (_CORES / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus
        }
    except OSError:
        return len(cpus)
    return len(siblings)
