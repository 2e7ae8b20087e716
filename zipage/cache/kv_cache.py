"""The tensors that hold cached keys, values, stored scores, positions and window queries."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of a KV pool. `window` and `num_query_slots` are 0 when nothing is ever compressed.

    `dtype` is the dtype of queries, keys and values in computations; `kv_dtype` that of stored keys
    and values, None if it is the same.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int = 0
    num_query_slots: int = 0
    kv_dtype: torch.dtype | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are stored with scales, see `zipage.cache.quantisation`."""
        return self.kv_dtype is not None

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers and KV heads."""
        itemsize = (self.kv_dtype or self.dtype).itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def score_bytes_per_token(self) -> int:
        """Bytes of the stored score (fp32) and position (int32) of one token; 0 if unused."""
        return 8 * self.num_layers * self.num_kv_heads if self.num_query_slots else 0

    @property
    def query_slot_bytes(self) -> int:
        """Bytes of one query slot: `window` post-RoPE queries of all layers and heads."""
        return self.num_layers * self.window * self.num_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """The KV pool.

    Attributes (L layers, N blocks, H KV heads, Q query heads, b block size, D head dim,
    M query slots, w window):

        kv: ``[L, N, 2, H, b, D]``; index 0 of dim 2 is keys (after RoPE), 1 is values.
        kv_bits: the same memory for copies: viewed as uint8 if keys and values are quantised,
            because torch has few operations on 8-bit floats.
        kv_scales: ``[L, 2, H]`` fp32, factors of stored keys and values if they are quantised;
            else 1.
        scores: ``[L, N, H, b]`` fp32, the score stored with a token when it was last scored.
        positions: ``[L, N, H, b]`` int32, the text position of a token, written at compression
            (before the first one a token's position is its slot).
        queries: ``[L, M, w, Q, D]``, the post-RoPE queries of the last `w` tokens before a trigger.

    `scores`, `positions` and `queries` have size 0 when `num_query_slots` is 0. Layers are the
    first dimension of every tensor.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        s = spec
        scored = s.num_blocks if s.num_query_slots else 0

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            if s.device.type == "cpu":
                return _untouched_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=s.device)

        self.kv = zeros(
            s.num_layers,
            s.num_blocks,
            2,
            s.num_kv_heads,
            s.block_size,
            s.head_dim,
            dtype=s.kv_dtype or s.dtype,
        )
        self.kv_bits = self.kv.view(torch.uint8) if s.is_quantised else self.kv
        self.kv_scales = torch.ones(
            s.num_layers, 2, s.num_kv_heads, dtype=torch.float32, device=s.device
        )
        self.scores = zeros(s.num_layers, scored, s.num_kv_heads, s.block_size, dtype=torch.float32)
        self.positions = zeros(
            s.num_layers, scored, s.num_kv_heads, s.block_size, dtype=torch.int32
        )
        self.queries = zeros(
            s.num_layers, s.num_query_slots, s.window, s.num_heads, s.head_dim, dtype=s.dtype
        )

    def layers(self, first: int, last: int) -> KVCache:
        """The pool of the layers ``[first, last)`` alone, in the same memory."""
        part = copy.copy(self)
        part.spec = replace(self.spec, num_layers=last - first)
        for name, tensor in vars(self).items():
            if isinstance(tensor, torch.Tensor):
                setattr(part, name, tensor[first:last])
        return part


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, aligned to cache lines, that take no memory until they are written.

    `torch.zeros` writes its zeros, so a large pool would be resident from the start.
    """
    count = math.prod(shape) * dtype.itemsize
    memory = np.zeros(count + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + count]).view(dtype).view(shape)
