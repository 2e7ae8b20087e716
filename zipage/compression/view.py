"""What a policy may see."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from zipage.cache.kv_cache import KVCache
from zipage.cache.quantisation import dequantise
from zipage.compression import scores
from zipage.compression.compactor import block_indices
from zipage.compression.job import CompressionJob
from zipage.compression.scores import Reduction

if TYPE_CHECKING:
    from zipage.compression.kernels import CompressionKernels


class CacheView:
    """One request's cache at the moment of a compression, as dense tensors made on demand.

    Letters: L layers, H KV heads, Q query heads, w window, T cached tokens, D head dim.

    Attributes:
        length: T.
        window: w; the last w slots are the window.
        block_size: b; slots ``[n * b, (n + 1) * b)`` lie in one block.
        num_layers: L.
        first_layer: index in the model of the first of these layers.
        num_tokens: text tokens written so far.
        prompt_len: tokens of the prompt.
        first: whether this is the request's first compression (slot order is then text order).
        num_scored: leading slots that carry a stored score.
        seed: seed for policies that draw at random.
    """

    def __init__(
        self,
        cache: KVCache,
        job: CompressionJob,
        scale: float,
        window: int,
        seed: int,
        kernels: CompressionKernels | None = None,
        first_layer: int = 0,
    ) -> None:
        self._cache = cache
        self._job = job
        self._scale = scale
        self._kernels = kernels
        self.length = job.length
        self.window = window
        self.block_size = cache.spec.block_size
        self.num_layers = cache.spec.num_layers
        self.first_layer = first_layer
        self.num_kv_heads = cache.spec.num_kv_heads
        self.num_tokens = job.num_tokens
        self.prompt_len = job.prompt_len
        self.first = job.num_scored == 0
        self.num_scored = job.num_scored
        self.seed = seed

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the view."""
        return self._cache.kv.device

    @cached_property
    def _blocks(self) -> torch.Tensor:
        return block_indices(self._job.source_blocks, self.device)

    def _tokens(self, index: int) -> torch.Tensor:
        cache = self._cache
        # Not index_select: on the CPU it first copies all keys, or values, of the pool.
        blocks = cache.kv_bits[:, :, index][:, self._blocks]  # [L, n, H, b, D]
        tokens = blocks.transpose(1, 2).flatten(2, 3)[:, :, : self.length]
        if not cache.spec.is_quantised:
            return tokens
        return dequantise(tokens, cache.kv_scales[:, index, :, None, None], cache.spec.dtype)

    def _state(self, state: torch.Tensor) -> torch.Tensor:
        blocks = state.index_select(1, self._blocks)  # [L, n, H, b]
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, : self.length]

    @cached_property
    def keys(self) -> torch.Tensor:
        """``[L, H, T, D]`` keys after RoPE."""
        return self._tokens(0)

    @cached_property
    def values(self) -> torch.Tensor:
        """``[L, H, T, D]`` values."""
        return self._tokens(1)

    @cached_property
    def queries(self) -> torch.Tensor:
        """``[L, w, Q, D]`` queries of the window after RoPE."""
        return self._cache.queries[:, self._job.query_slot]

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[L, H, T]`` int32 text positions."""
        slots = torch.arange(self.length, dtype=torch.int32, device=self.device)
        unscored = (slots + (self.num_tokens - self.length)).expand(
            self.num_layers, self.num_kv_heads, -1
        )
        if self.num_scored == 0:
            return unscored
        return torch.where(self.scored, self._state(self._cache.positions), unscored)

    @cached_property
    def scored(self) -> torch.Tensor:
        """``[T]`` bool: slots that carry a stored score."""
        return torch.arange(self.length, device=self.device) < self.num_scored

    @cached_property
    def stored_scores(self) -> torch.Tensor:
        """``[L, H, T]`` fp32 stored scores, 0 where there is none."""
        return self._state(self._cache.scores).masked_fill(~self.scored, 0.0)

    def attention(self, group: Reduction = "max", window: Reduction = "mean") -> torch.Tensor:
        """Attention the window pays to each token, ``[L, H, T]`` fp32.

        See `zipage.compression.scores.window_attention`.
        """
        if self._kernels is not None:
            return self._kernels.attention(self._job, self._scale, group, window)
        return scores.window_attention(self.queries, self.keys, self._scale, group, window)

    def redundancy(self, local: bool, tau: float, threshold: float) -> torch.Tensor:
        """Redundancy of each token's key, ``[L, H, T]`` fp32, summing to 1 over T.

        See `zipage.compression.scores.redundancy`.
        """
        if self._kernels is not None:
            return self._kernels.redundancy(self._job, local, tau, threshold)
        return scores.redundancy(self.keys, self.positions, self.block_size, local, tau, threshold)

    def value_norms(self) -> torch.Tensor:
        """Euclidean norm of each token's value, ``[L, H, T]`` fp32."""
        if self._kernels is not None:
            return self._kernels.value_norms(self._job)
        norms: torch.Tensor = torch.linalg.vector_norm(self.values.float(), dim=-1)
        return norms

    def max_pool(self, values: torch.Tensor, kernel: int) -> torch.Tensor:
        """Max-pool ``[L, H, T]`` over text order: neighbours are the nearest cached tokens."""
        if self.first:
            return scores.max_pool(values, kernel)
        order = self.positions.argsort(dim=-1)
        pooled = scores.max_pool(values.gather(-1, order), kernel)
        return torch.empty_like(values).scatter_(-1, order, pooled)

    def block_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Replace each value of ``[L, H, T]`` by the mean of its block."""
        blocks = -(-self.length // self.block_size)
        padding = blocks * self.block_size - self.length
        padded = F.pad(values, (0, padding))
        sums = padded.view(self.num_layers, self.num_kv_heads, blocks, self.block_size).sum(-1)
        sums[..., :-1] /= self.block_size
        sums[..., -1] /= self.block_size - padding
        return sums.repeat_interleave(self.block_size, dim=-1)[..., : self.length]
