"""Running a decoder over a few sequences without an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence

import torch

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, make_backend
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.models.decoder import Decoder
from zipage.models.transformers_model import TransformersModel

BackendFactory = Callable[[KVCache, float], AttentionBackend]


class PlainBackend(AttentionBackend):
    """The attention contract written out one sequence at a time, as slowly as it reads."""

    name = "plain"

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        spec = self.cache.spec
        heads, kv_heads, dim, size = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
        )
        rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = transform.cos[step.positions][:, None], transform.sin[step.positions][:, None]

        def prepare(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            x = x.float()
            if weight is not None:
                norm = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + transform.norm_eps)
                x = x * norm * weight.float()
            half = cos.shape[-1]
            a, b, rest = x.split((half, half, dim - 2 * half), -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        q, k = prepare(q, transform.q_norm), prepare(k, transform.k_norm)
        kv = self.cache.kv[layer]
        for row, slot in enumerate(step.slot_mapping.tolist()):
            if slot >= 0:
                kv[slot // size, 0, :, slot % size] = k[row].to(kv.dtype)
                kv[slot // size, 1, :, slot % size] = v[row]
        out = torch.zeros(qkv.shape[0], heads, dim, dtype=qkv.dtype)
        starts = step.query_start.tolist()
        for s, length in enumerate(step.cache_lens.tolist()):
            first, last = starts[s], starts[s + 1]
            blocks = step.block_tables[s, : -(-length // size)].long()
            cached = kv[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)
            keys, values = cached[:, :, :length].float().repeat_interleave(heads // kv_heads, 1)
            for row in range(first, last):
                seen = length - (last - first) + (row - first) + 1
                scores = torch.einsum("hd,htd->ht", q[row], keys[:, :seen]) * self.scale
                out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, :seen])
        return out.view(qkv.shape[0], heads * dim)


def _backends() -> dict[str, BackendFactory]:
    found: dict[str, BackendFactory] = {"plain": PlainBackend}
    for name in ("torch", "native"):
        if importlib.util.find_spec(f"zipage.attention.{name}_backend"):
            if name == "native":
                from zipage.kernels import native

                if not native.available():
                    continue
            found[name] = lambda cache, scale, name=name: make_backend(name, cache, scale)
    return found


BACKENDS = _backends()


class PagedRun:
    """The KV cache of a few sequences, each with its blocks scattered over the pool."""

    def __init__(
        self,
        decoder: Decoder | TransformersModel,
        make_backend: BackendFactory = PlainBackend,
        num_sequences: int = 1,
        max_len: int = 128,
        block_size: int = 16,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        per_sequence = -(-max_len // block_size)
        num_blocks = num_sequences * per_sequence + 1
        self.decoder = decoder
        self.block_size = block_size
        spec = KVCacheSpec(
            num_layers=decoder.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.config.head_dim,
            dtype=cache_dtype or decoder.dtype,
            device=torch.device("cpu"),
        )
        self.backend = make_backend(KVCache(spec), decoder.scale)
        packable = isinstance(decoder, Decoder) and decoder.all_reduce is None
        if self.backend.name == "native" and packable:
            decoder.pack()  # as the model runner does
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
        self.tables = order[: num_sequences * per_sequence].view(num_sequences, per_sequence)
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def step(
        self, new_tokens: Mapping[int, Sequence[int]], padding: int = 0
    ) -> dict[int, torch.Tensor]:
        """Append tokens to sequences; return the hidden states ``[q, E]`` of each.

        `padding` adds rows beyond the multiple of 4.
        """
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for s, tokens in new_tokens.items():
            begin = self.lengths[s]
            self.lengths[s] = begin + len(tokens)
            for position, token in enumerate(tokens, begin):
                block = int(self.tables[s, position // self.block_size])
                ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(ids))
            lengths.append(self.lengths[s])
        count = len(ids)
        pad = -count % 4 + padding
        inputs = StepInputs(
            input_ids=torch.tensor(ids + [0] * pad),
            positions=torch.tensor(positions + [0] * pad),
            slot_mapping=torch.tensor(slots + [-1] * pad),
            capture=torch.full((count + pad,), -1),
            query_start=torch.tensor(starts, dtype=torch.int32),
            cache_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=self.tables[list(new_tokens)].to(torch.int32).contiguous(),
            num_tokens=count,
            max_query_len=max(len(tokens) for tokens in new_tokens.values()),
            max_cache_len=max(lengths),
            any_capture=False,
        )
        hidden = self.decoder(inputs, self.backend)
        return {s: hidden[a:b] for s, a, b in zip(new_tokens, starts[:-1], starts[1:], strict=True)}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Feed sequence 0 in chunks of the given lengths; return the logits of all tokens."""
        assert sum(chunks) == len(tokens)
        rows, begin = [], 0
        for length in chunks:
            rows.append(self.step({0: tokens[begin : begin + length]})[0])
            begin += length
        return self.decoder.compute_logits(torch.cat(rows))

    @torch.inference_mode()
    def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos: Sequence[int]
    ) -> list[list[int]]:
        """Decode all prompts together, greedily; an end token is kept, as `generate` does."""
        texts: list[list[int]] = [[] for _ in prompts]
        pending = {s: list(prompt) for s, prompt in enumerate(prompts)}
        while pending:
            hidden = self.step(pending)
            last = torch.stack([rows[-1] for rows in hidden.values()])
            picked = self.decoder.compute_logits(last).argmax(-1).tolist()
            pending = {}
            for s, token in zip(hidden, picked, strict=True):
                texts[s].append(token)
                if token not in eos and len(texts[s]) < max_tokens:
                    pending[s] = [token]
        return texts
