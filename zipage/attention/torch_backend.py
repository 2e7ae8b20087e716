"""Attention in plain torch: the reference, on any device and in any dtype.

Shapes: T' rows of a step, S sequences, Q query heads, H KV heads, G = Q / H, b block size,
D head dim, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, on_host
from zipage.cache.kv_cache import KVCache
from zipage.cache.quantisation import dequantise, quantise

# Most elements of keys and values gathered at once.
_GATHER_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class _Decodes:
    """Some sequences with one new token each.

    `rows` ``[S]`` int64 are their rows in the step, `entries` ``[S * 2 * H * T]`` int64 their keys
    and values as rows of the cache viewed as ``[N * 2 * H * b, D]``, `mask` ``[S, 1, 1, T]``.
    """

    rows: torch.Tensor
    entries: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Prefill:
    """A sequence with several new tokens: rows ``[start, stop)`` of the step.

    `entries` ``[2 * H * T]`` as above; `mask` ``[q, T]``, or None for a sequence without earlier
    tokens.
    """

    start: int
    stop: int
    entries: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Scatter:
    """Where rows of a step are written.

    Rows without a target (-1) repeat the write of the first row that has one: unlike a boolean
    mask, an index of fixed size needs no host synchronisation. If no row has a target, `written`
    is False and the old value is written back.
    """

    source: torch.Tensor
    target: torch.Tensor
    written: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor) -> _Scatter:
        valid = index >= 0
        first = valid.to(torch.uint8).argmax()
        source = torch.where(valid, torch.arange(len(index), device=index.device), first)
        return cls(source, index[source].clamp(min=0), valid[first])


class StepIndices:
    """Index tensors of a step, the same for every layer."""

    def __init__(self, step: StepInputs, cache: KVCache, transform: QKVTransform) -> None:
        self.step = step
        self.cache = cache
        self.cos_table = transform.cos
        self.cos = transform.cos[step.positions].unsqueeze(1)
        self.sin = transform.sin[step.positions].unsqueeze(1)
        self.keys = _Scatter.of(step.slot_mapping)
        self.queries = _Scatter.of(step.capture) if step.any_capture else None
        self.decodes: list[_Decodes] = []
        self.prefills: list[_Prefill] = []
        num_seqs = len(step.cache_lens)
        if step.max_query_len <= 1 and step.num_tokens == num_seqs:
            self._add_decodes(torch.arange(num_seqs, device=step.positions.device))
        else:
            self._add_mixed()
        # Whether some rows of the output belong to no sequence.
        self.padded = len(step.positions) > step.num_tokens

    def _add_mixed(self) -> None:
        step = self.step
        starts: list[int] = on_host(step.query_start_host, step.query_start).tolist()
        lens: list[int] = on_host(step.cache_lens_host, step.cache_lens).tolist()
        single: list[int] = []
        for i, (start, stop) in enumerate(pairwise(starts)):
            if stop - start == 1:
                single.append(i)
            elif stop > start:
                self._add_prefill(i, start, stop, lens[i])
        if single:
            self._add_decodes(torch.tensor(single, device=step.positions.device))

    def _entries(self, tables: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Cache rows ``[S * 2 * H * T]`` of slots ``[S, T]`` of sequences with block `tables`."""
        spec = self.cache.spec
        b, heads = spec.block_size, spec.num_kv_heads
        blocks = tables.gather(1, slots // b).long()
        tiles = torch.arange(2 * heads, device=slots.device).view(1, -1, 1)
        rows = (blocks.unsqueeze(1) * (2 * heads) + tiles) * b + (slots % b).unsqueeze(1)
        return rows.view(-1)

    def _add_decodes(self, seqs: torch.Tensor) -> None:
        step, spec = self.step, self.cache.spec
        if not len(seqs):
            return
        longest = step.max_cache_len
        per_seq = 2 * spec.num_kv_heads * spec.head_dim * longest
        times = torch.arange(longest, device=seqs.device)
        for part in torch.split(seqs, max(1, _GATHER_ELEMENTS // per_seq)):
            lens = step.cache_lens[part].long().clamp(min=1).unsqueeze(1)
            # Slots beyond the end read the last valid one instead: an unused slot may hold NaN,
            # which a weight of zero does not remove.
            slots = torch.minimum(times, lens - 1)
            self.decodes.append(
                _Decodes(
                    rows=step.query_start[part].long(),
                    entries=self._entries(step.block_tables[part], slots),
                    mask=(times < lens).view(len(part), 1, 1, longest),
                )
            )

    def _add_prefill(self, seq: int, start: int, stop: int, length: int) -> None:
        device = self.step.positions.device
        fresh = stop - start
        slots = torch.arange(length, device=device).unsqueeze(0)
        mask = None
        if fresh < length:
            mask = torch.ones(fresh, length, dtype=torch.bool, device=device)
            mask = mask.tril_(length - fresh)
        entries = self._entries(self.step.block_tables[seq : seq + 1], slots)
        self.prefills.append(_Prefill(start, stop, entries, mask))


class TorchBackend(AttentionBackend):
    """Gathers each sequence's keys and values and calls ``scaled_dot_product_attention``.

    Sequences with one new token are computed together, others one by one. On CUDA nothing waits
    for the device if every sequence has one new token or the step has host copies.
    Steps must not be changed between the layers of a forward pass.
    """

    name = "torch"

    def __init__(self, cache: KVCache, scale: float) -> None:
        super().__init__(cache, scale)
        self._plan: StepIndices | None = None
        self._last_layer = -1

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        plan = self._plan_of(layer, transform, step)
        spec = self.cache.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        all_heads = qkv.view(-1, heads + 2 * kv_heads, dim)
        q, k, v = torch.split(all_heads, [heads, kv_heads, kv_heads], dim=1)
        q = _rotate(_normalise(q, transform.q_norm, transform.norm_eps), plan.cos, plan.sin)
        k = _rotate(_normalise(k, transform.k_norm, transform.norm_eps), plan.cos, plan.sin)
        self._write(layer, q, torch.stack((k, v), dim=1), plan)

        entries = self.cache.kv_bits[layer].view(-1, dim)
        out = torch.zeros_like(q) if plan.padded else torch.empty_like(q)
        for decodes in plan.decodes:
            tokens = entries.index_select(0, decodes.entries)
            tokens = tokens.view(len(decodes.rows), 2, kv_heads, -1, dim)
            keys, values = self._restored(layer, tokens).unbind(1)
            # The query heads of a group are treated as query positions of their KV head.
            queries = q[decodes.rows].view(-1, kv_heads, heads // kv_heads, dim)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=decodes.mask, scale=self.scale
            )
            out[decodes.rows] = attended.reshape(-1, heads, dim)
        for prefill in plan.prefills:
            tokens = entries.index_select(0, prefill.entries).view(2, kv_heads, -1, dim)
            keys, values = (
                self._restored(layer, tokens)
                .unsqueeze(2)
                .expand(2, kv_heads, heads // kv_heads, -1, dim)
                .unbind(0)
            )
            queries = q[prefill.start : prefill.stop].transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                queries.view(kv_heads, heads // kv_heads, -1, dim),
                keys,
                values,
                attn_mask=prefill.mask,
                is_causal=prefill.mask is None,
                scale=self.scale,
            )
            out[prefill.start : prefill.stop] = attended.flatten(0, 1).transpose(0, 1)
        return out.view(-1, heads * dim)

    def _plan_of(self, layer: int, transform: QKVTransform, step: StepInputs) -> StepIndices:
        """The step's plan, made when a forward pass begins."""
        plan = self._plan
        if (
            plan is None
            or plan.step is not step
            or plan.cos_table is not transform.cos
            or layer <= self._last_layer
        ):
            plan = self._plan = StepIndices(step, self.cache, transform)
        self._last_layer = layer
        return plan

    def _restored(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Stored keys and values ``[..., 2, H, T, D]``, dequantised if necessary."""
        if not self.cache.spec.is_quantised:
            return tokens
        scales = self.cache.kv_scales[layer, :, :, None, None]
        return dequantise(tokens, scales, self.cache.spec.dtype)

    def _write(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: StepIndices) -> None:
        """Store keys and values ``kv [T', 2, H, D]`` and captured queries ``q [T', Q, D]``."""
        cache, to = self.cache.kv_bits[layer], plan.keys
        block = to.target // self.cache.spec.block_size
        offset = to.target % self.cache.spec.block_size
        if self.cache.spec.is_quantised:
            kv = quantise(kv, self.cache.kv_scales[layer].unsqueeze(-1))
        fresh = kv[to.source]
        old = cache[block, :, :, offset]
        cache[block, :, :, offset] = torch.where(to.written, fresh, old)
        if plan.queries is not None:
            to = plan.queries
            slots = self.cache.queries[layer].flatten(0, 1)
            slots[to.target] = torch.where(to.written, q[to.source], slots[to.target])


def _normalise(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in fp32, rounded before the weight as in transformers."""
    if weight is None:
        return x
    return weight * F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of ``x [T', heads, D]`` by ``cos, sin [T', 1, R / 2]``, in fp32."""
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    rest = x[..., 2 * half :]
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
