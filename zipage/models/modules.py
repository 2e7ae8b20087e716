"""Building blocks of the decoder and its mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# From this many elements, torch splits an elementwise operation between threads.
_PARALLEL_ELEMENTS = 32768


class WeightHolder(nn.Module):
    """A module whose weights are allocated empty and read as plain attributes."""

    def add_weight(self, name: str, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weight `name`."""
        weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.register_parameter(name, weight)
        # As an instance attribute, a weight avoids calls of nn.Module.__getattr__ in every step.
        self.__dict__[name] = weight


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [rows, 2 I]``, gates first; overwrites the gates.

    In fp32 on the CPU a row's result depends on that row alone.

    Returns:
        ``[rows, I]``, a view of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    serial_rows = max(1, _PARALLEL_ELEMENTS // gate.shape[1])
    if gate.shape[0] > serial_rows and gate.device.type == "cpu" and gate.dtype == torch.float32:
        # Threads would split the elements anywhere, and the ends of their shares are computed
        # with a different exponential: rows would depend on the batch.
        for rows in torch.split(gate, serial_rows):
            F.silu(rows, inplace=True)
    else:
        F.silu(gate, inplace=True)
    return gate.mul_(up)
