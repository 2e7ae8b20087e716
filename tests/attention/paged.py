"""Random sequences in a paged cache, and what attention to them must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import dequantise

MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Geometry:
    """Shape of one attention layer; `rotary` is the rotated width."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int = 16
    rotary: int | None = None
    qk_norm: bool = True

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass
class Text:
    """A sequence: projected inputs ``[L, width]`` and RoPE positions of its tokens, its blocks.

    `done` tokens are in the cache.
    """

    qkv: torch.Tensor
    positions: torch.Tensor
    blocks: list[int]
    done: int = 0


@dataclass(frozen=True)
class Piece:
    """`count` tokens of a text to be computed in one step, captured from `slot` on if given.

    Attributes:
        capture: row of the query store the first of the tokens goes to, or None.
    """

    text: Text
    count: int
    capture: int | None = None


@dataclass
class Paged:
    """A cache full of NaN whose blocks are handed out in random order.

    With `kv_dtype` every head has another scale.
    """

    geometry: Geometry
    seed: int = 0
    num_blocks: int = 320
    num_layers: int = 1
    dtype: torch.dtype = torch.float32
    window: int = 4
    query_slots: int = 2
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None
    random: torch.Generator = field(init=False)
    cache: KVCache = field(init=False)
    transform: QKVTransform = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        g = self.geometry
        self.random = torch.Generator().manual_seed(self.seed)
        self.cache = KVCache(
            KVCacheSpec(
                num_layers=self.num_layers,
                num_blocks=self.num_blocks,
                block_size=g.block_size,
                num_heads=g.heads,
                num_kv_heads=g.kv_heads,
                head_dim=g.dim,
                dtype=self.dtype,
                device=torch.device(self.device),
                window=self.window,
                num_query_slots=self.query_slots,
                kv_dtype=self.kv_dtype,
            )
        )
        if self.kv_dtype is None:
            self.cache.kv.fill_(float("nan"))
        else:
            self.cache.kv_bits.fill_(0x7F)
            exponents = torch.arange(self.cache.kv_scales.numel()) % 5 - 6
            self.cache.kv_scales.copy_((2.0**exponents).view(self.cache.kv_scales.shape))
        self.cache.queries.fill_(float("nan"))
        rotary = g.dim // 2 * 2 if g.rotary is None else g.rotary
        angles = (
            torch.arange(MAX_POSITIONS)
            .double()
            .outer(10000.0 ** (-torch.arange(0, rotary, 2).double() / max(rotary, 1)))
        )
        weights = (
            (self.randn(g.dim) * 0.2 + 1).to(self.dtype),
            (self.randn(g.dim) * 0.2 + 1).to(self.dtype),
        )
        q_norm, k_norm = weights if g.qk_norm else (None, None)
        self.transform = QKVTransform(
            None if q_norm is None else q_norm.to(self.device),
            None if k_norm is None else k_norm.to(self.device),
            1e-6,
            angles.cos().float().to(self.device),
            angles.sin().float().to(self.device),
        )
        self.free = torch.randperm(self.num_blocks, generator=self.random).tolist()

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def text(self, length: int, offset: int = 0, shared: Text | None = None) -> Text:
        """A text of `length` tokens whose positions start at `offset`.

        With `shared` it begins with all full blocks of that text, as after a prefix cache hit.
        """
        b = self.geometry.block_size
        qkv = self.randn(length, self.geometry.width).to(self.dtype)
        positions = torch.arange(offset, offset + length)
        blocks: list[int] = []
        done = 0
        if shared is not None:
            done = min(shared.done // b * b, (length - 1) // b * b)
            blocks = shared.blocks[: done // b]
            qkv[:done] = shared.qkv[:done]
            positions[:done] = shared.positions[:done]
        blocks = blocks + [self.free.pop() for _ in range(-(-length // b) - len(blocks))]
        return Text(qkv, positions, blocks, done)

    def step(self, pieces: Sequence[Piece], host: bool = False) -> tuple[torch.Tensor, StepInputs]:
        """Inputs ``[T', width]`` and metadata of a step; padding rows hold NaN."""
        b = self.geometry.block_size
        counts = [piece.count for piece in pieces]
        total = sum(counts)
        padded = -(-total // 4) * 4
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        lens = [piece.text.done + piece.count for piece in pieces]
        tables = torch.zeros(len(pieces), max(len(p.text.blocks) for p in pieces)).int()
        qkv = torch.full((padded, self.geometry.width), float("nan"), dtype=self.dtype)
        positions = torch.zeros(padded, dtype=torch.int64)
        mapping = torch.full((padded,), -1)
        capture = torch.full((padded,), -1)
        for i, (piece, start) in enumerate(zip(pieces, starts, strict=False)):
            text, rows = piece.text, slice(start, start + piece.count)
            new = slice(text.done, text.done + piece.count)
            tables[i, : len(text.blocks)] = torch.tensor(text.blocks)
            qkv[rows] = text.qkv[new]
            positions[rows] = text.positions[new]
            slots = torch.arange(new.start, new.stop)
            mapping[rows] = torch.tensor(text.blocks)[slots // b] * b + slots % b
            if piece.capture is not None:
                capture[rows] = piece.capture + torch.arange(piece.count)
        step = StepInputs(
            input_ids=torch.zeros(padded, dtype=torch.int64, device=self.device),
            positions=positions.to(self.device),
            slot_mapping=mapping.to(self.device),
            capture=capture.to(self.device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            cache_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            block_tables=tables.to(self.device),
            num_tokens=total,
            max_query_len=max(counts),
            max_cache_len=max(lens),
            any_capture=bool((capture >= 0).any()),
            query_start_host=np.array(starts) if host else None,
            cache_lens_host=np.array(lens) if host else None,
        )
        return qkv.to(self.device), step

    def run(
        self,
        backend: AttentionBackend,
        pieces: Sequence[Piece],
        layer: int = 0,
        host: bool = False,
    ) -> list[torch.Tensor]:
        """Run a step; the output rows of each piece, ``[count, Q * D]``."""
        qkv, step = self.step(pieces, host)
        out = backend.attend(layer, qkv, self.transform, step)
        assert out.shape == (len(qkv), self.geometry.heads * self.geometry.dim)
        assert out.dtype == self.dtype
        assert out[step.num_tokens :].isfinite().all()
        for piece in pieces:
            piece.text.done += piece.count
        return list(out.cpu()[: step.num_tokens].split([piece.count for piece in pieces]))

    def heads(self, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[L, Q, D]``, keys and values ``[L, H, D]`` of a text in float64."""
        g, t = self.geometry, self.transform
        x = text.qkv.double().view(-1, g.heads + 2 * g.kv_heads, g.dim)
        q, k, v = x.split([g.heads, g.kv_heads, g.kv_heads], dim=1)
        cos = t.cos.cpu().double()[text.positions].unsqueeze(1)
        sin = t.sin.cpu().double()[text.positions].unsqueeze(1)
        half = cos.shape[-1]

        def norm_and_rotate(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            if weight is not None:
                x = (
                    x
                    / (x.square().mean(-1, keepdim=True) + t.norm_eps).sqrt()
                    * weight.cpu().double()
                )
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

        return norm_and_rotate(q, t.q_norm), norm_and_rotate(k, t.k_norm), v

    def stored(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[done, H, D]`` of a text as they are in the first layer's cache."""
        cache = self.cache
        bits = cache.kv_bits[0][text.blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : text.done]
        if self.kv_dtype is None:
            return bits[0], bits[1]
        scales = cache.kv_scales[0, :, None, :, None]
        keys, values = dequantise(bits, scales, torch.float32).cpu()
        return keys, values

    def expected(self, text: Text, from_cache: bool = False) -> torch.Tensor:
        """Attention of every token to itself and those before, ``[L, Q * D]`` in float64.

        With `from_cache`, to the keys and values found in the cache.
        """
        g = self.geometry
        q, k, v = self.heads(text)
        if from_cache:
            k, v = (x.double() for x in self.stored(text))
            q = q[: len(k)]
        rows = []
        for i in range(len(q)):
            per_head = []
            for h in range(g.heads):
                group = h // (g.heads // g.kv_heads)
                scores = k[: i + 1, group] @ q[i, h] * g.scale
                per_head.append(scores.softmax(0) @ v[: i + 1, group])
            rows.append(torch.cat(per_head))
        return torch.stack(rows)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude; inf if `actual` is not finite."""
    difference = (actual.double() - expected.double()).abs().max()
    if not difference.isfinite():
        return float("inf")
    return float(difference / expected.double().abs().max())
