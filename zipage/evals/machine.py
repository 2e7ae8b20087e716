"""The machine a number was measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from zipage import __version__

_STAT = Path("/proc/stat")


def describe_machine(device: str = "cpu") -> dict[str, str | int]:
    """The processor or accelerator, the threads, and the versions that affect speed.

    Args:
        device: where the model runs, as torch names it.
    """
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "zipage": __version__,
    }


def idle_threads(seconds: float = 0.5) -> int:
    """Number of threads for a computation on idle cores alone, at most torch's own choice.

    A thread that waits for a core stops the others, hundreds of times per step: on two cores of
    which another program uses one, one thread is several times as fast as two.

    Args:
        seconds: how long to watch the cores. This process must not compute meanwhile.

    Returns:
        At least 1; torch's choice if the system doesn't say how busy its cores are.
    """
    before = _cpu_times()
    time.sleep(seconds)
    total, idle = (after - then for after, then in zip(_cpu_times(), before, strict=True))
    most = torch.get_num_threads()
    if total <= 0:
        return most
    return max(1, min(most, round(idle / total * (os.cpu_count() or 1))))


def _cpu_times() -> tuple[int, int]:
    """Ticks of all cores since boot, and the idle ones of these; zeros if that is not known."""
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal; then guests, counted in user.
        times = [int(word) for word in _STAT.read_text().split()[1:9]]
        return sum(times), times[3] + times[4]
    except (OSError, ValueError, IndexError):
        return 0, 0


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
