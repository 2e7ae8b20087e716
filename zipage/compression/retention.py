"""Which tokens a compression kept: read from the position store, counted by text position."""

from __future__ import annotations

import numpy as np
import torch

from zipage.cache.kv_cache import KVCache
from zipage.compression.compactor import block_indices
from zipage.compression.job import CompressionJob
from zipage.outputs import CompressionRecord


def kept_positions(cache: KVCache, job: CompressionJob, wait: bool) -> torch.Tensor:
    """Text positions of the survivors, once the job has run.

    Args:
        cache: the KV pool.
        job: the compression.
        wait: whether they are needed at once. Otherwise they are copied from CUDA in stream order
            and may be read once the work queued on the current stream is done.

    Returns:
        ``[L, H, keep]`` int32 on the CPU, in slot order.
    """
    target = block_indices(job.target_blocks, cache.positions.device)
    positions = cache.positions.index_select(1, target).transpose(1, 2).flatten(2)
    return positions.to("cpu", non_blocking=not wait)


def count_keepers(
    positions: torch.Tensor, job: CompressionJob, seconds: float, by_layer: bool = False
) -> CompressionRecord:
    """Count by text position what a compression kept.

    Args:
        positions: ``[L, H, keep]`` text positions, see `kept_positions`.
        job: the compression.
        seconds: its duration.
        by_layer: whether each layer's counts are reported too.
    """
    layers, heads, keep = positions.shape
    flat = positions.reshape(layers, heads * keep).numpy().astype(np.int64)
    flat += np.arange(layers)[:, None] * job.num_tokens
    counts = np.bincount(flat.ravel(), minlength=layers * job.num_tokens)
    counts = counts.reshape(layers, job.num_tokens)
    return CompressionRecord(
        num_tokens=job.num_tokens,
        length=job.length,
        kept=keep,
        lists=layers * heads,
        keepers=counts.sum(0).tolist(),
        layer_positions=np.count_nonzero(counts, axis=1).tolist(),
        seconds=seconds,
        layer_keepers=counts.astype(np.uint8).tobytes() if by_layer else None,
    )
