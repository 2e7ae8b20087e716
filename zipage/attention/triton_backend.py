"""Attention on CUDA through Triton kernels; nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, on_host
from zipage.cache.kv_cache import KVCache
from zipage.execution.transfer import to_device
from zipage.kernels.triton.decode_attention import DecodeAttention, DecodeUnits
from zipage.kernels.triton.prefill_attention import PrefillAttention, PrefillTiles
from zipage.kernels.triton.qkv import prepare_qkv


@dataclass(frozen=True)
class _Plan:
    """What a step computes with each kernel; None for nothing."""

    step: StepInputs
    decodes: DecodeUnits | None
    prefills: PrefillTiles | None


class TritonBackend(AttentionBackend):
    """Attention of single new tokens by split-KV kernels, of several new tokens by tiles.

    On the CPU it works only under Triton's interpreter.
    Steps must not be changed between the layers of a forward pass.

    Args:
        cache: the KV pool.
        scale: factor of the attention logits.
        max_sequences: most sequences of a step.
        batch_invariant: a token's result is bit-identical whatever the batch, and whether it is
            computed alone or in a chunk. Tiles then compute everything, because splitting caches
            depending on the batch, or differently from chunks, changes rounding.
    """

    name = "triton"

    def __init__(
        self,
        cache: KVCache,
        scale: float,
        max_sequences: int = 256,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(cache, scale)
        self.batch_invariant = batch_invariant
        # CUDA graphs always use the kernel that can capture; other steps must then run it too.
        self._capture = cache.spec.num_query_slots > 0 if batch_invariant else None
        self.decode = DecodeAttention(cache, scale, max_sequences)
        self.prefill = PrefillAttention(cache, scale, batch_invariant)
        self._plan: _Plan | None = None

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        plan = self._plan
        if plan is None or plan.step is not step:
            plan = self._plan = self._make_plan(step)
        spec = self.cache.spec
        prepare_qkv(layer, qkv, transform, step, self.cache, self._capture)
        out = torch.empty(
            len(qkv), spec.num_heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device
        )
        if plan.prefills is not None:
            if len(qkv) > step.num_tokens:
                out[step.num_tokens :].zero_()
            self.prefill.run(layer, qkv, step.block_tables, step.cache_lens, plan.prefills, out)
        if plan.decodes is not None:
            self.decode.run(layer, qkv, step.block_tables, plan.decodes, out)
        return out

    def use_units(self, step: StepInputs, units: DecodeUnits) -> None:
        """Compute `step`, whose sequences all decode, with these units (in a captured graph)."""
        self._plan = _Plan(step, units, None)

    def use_tiles(self, step: StepInputs, tiles: PrefillTiles) -> None:
        """Compute `step` with these tiles (in a captured graph)."""
        self._plan = _Plan(step, None, tiles)

    def _make_plan(self, step: StepInputs) -> _Plan:
        starts = on_host(step.query_start_host, step.query_start)
        lens = on_host(step.cache_lens_host, step.cache_lens)
        fresh = starts[1:] - starts[:-1]
        decoding = (fresh == 1) & (not self.batch_invariant)
        decodes = prefills = None
        if (~decoding & (fresh > 0)).any():
            tiles = self.prefill.plan(starts, ~decoding)
            prefills = PrefillTiles(to_device(torch.from_numpy(tiles), step.positions.device))
        if decoding.any():
            units, unit_starts = self.decode.plan(lens, starts[:-1], decoding)
            fill = prefills is None
            if fill:
                rows = len(step.positions)
                unit_starts = np.pad(unit_starts, (0, rows + 1 - len(unit_starts)), mode="edge")
            packed = np.concatenate((units.ravel(), unit_starts, [len(units)])).astype(np.int32)
            device = to_device(torch.from_numpy(packed), step.positions.device)
            cut = units.size
            decodes = DecodeUnits(
                units=device[:cut].view(-1, 4),
                unit_starts=device[cut:-1],
                num_units=device[-1:],
                fill=fill,
            )
        return _Plan(step, decodes, prefills)
