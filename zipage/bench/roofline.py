"""The least time that memory bandwidth allows for a run, and the measured bandwidth."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zipage.models.decoder import Decoder
    from zipage.models.transformers_model import TransformersModel

#: Larger than any cache, so that memory is measured.
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_COPIES = 7


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, reads plus writes, of copying a large tensor on a device.

    The median of several copies, with torch's current number of threads.
    """
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(_COPIES):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size / statistics.median(times)


def weight_bytes_per_step(model: Decoder | TransformersModel) -> int:
    """Bytes of the weights that a forward pass reads.

    All weights except the embedding table, of which it reads only a row per token, unless the table
    is also the output head. All experts of a mixture count, as the tokens of a large batch use them
    all; a small batch reads less.
    """
    unread = 0 if model.config.tie_word_embeddings else _bytes(model.embed_weight)
    return model.weight_bytes - unread


@dataclass(frozen=True)
class Roofline:
    """The minimum memory traffic of a run, in bytes, and the bandwidth.

    Attributes:
        weight_bytes: the weights, once per step.
        kv_read_bytes: keys and values of all tokens attended to, once per step and request.
        kv_moved_bytes: tokens moved by compressions, read and written: at most one for each
            evicted token, whose place it takes.
        bandwidth: bandwidth of a copy on the same device, bytes per second.
    """

    weight_bytes: int
    kv_read_bytes: int
    kv_moved_bytes: int
    bandwidth: float

    @property
    def total_bytes(self) -> int:
        """All traffic."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_moved_bytes

    @property
    def seconds(self) -> float:
        """Time of that traffic at the measured bandwidth."""
        return self.total_bytes / self.bandwidth


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
