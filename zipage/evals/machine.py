"""The machine a number was measured on."""

from __future__ import annotations

import platform

import torch

from zipage import __version__


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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
