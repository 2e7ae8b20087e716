"""Copies from the host to the device."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device` through pinned memory, without waiting for the device."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
