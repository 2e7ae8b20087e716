"""How many OpenMP threads compute, and how they wait. OpenMP reads this when torch is imported."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_STAT = Path("/proc/stat")
_CORES = Path("/sys/devices/system/cpu")
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
    which another program uses one, one thread is ten times as fast as two. On an idle machine
    nothing is set.
    """
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    cpus = os.sched_getaffinity(0)
    idle = _idle_cpus(_WATCH)
    if idle is None or idle >= len(cpus):
        return
    threads = max(1, min(idle, _physical_cores(cpus)))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logger.log(
        logging.WARNING if 2 * threads <= len(cpus) else logging.INFO,
        "other programs use the processor: %d of %d threads (OMP_NUM_THREADS sets their number)",
        threads,
        len(cpus),
    )


def _idle_cpus(seconds: float) -> int | None:
    """Logical CPUs of the machine that nothing uses, rounded; None if the system doesn't say."""
    before = _cpu_times()
    time.sleep(seconds)
    total, idle = (after - then for after, then in zip(_cpu_times(), before, strict=True))
    return None if total <= 0 else round(idle / total * (os.cpu_count() or 1))


def _cpu_times() -> tuple[int, int]:
    """Ticks of all CPUs since boot, and the idle ones of these; zeros if that is not known."""
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal; then guests, counted in user.
        times = [int(word) for word in _STAT.read_text().split()[1:9]]
        return sum(times), times[3] + times[4]
    except (OSError, ValueError, IndexError):
        return 0, 0


def _physical_cores(cpus: set[int]) -> int:
    """Cores to which these logical CPUs belong, as torch takes no more threads than that."""
    try:
        siblings = {
            (_CORES / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus
        }
    except OSError:
        return len(cpus)
    return len(siblings)
