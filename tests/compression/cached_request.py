"""Requests with random cached tokens, and what is in their blocks."""

from __future__ import annotations

import os
import platform
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch

from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import dequantise, quantise, scales_for
from zipage.compression.job import CompressionJob

# Not `native.available()`: a kernel that no longer builds must fail the tests, not skip them.
HAS_COMPILER = (
    platform.system() == "Linux"
    and os.environ.get("ZIPAGE_NATIVE", "1") != "0"
    and any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc")))
)

Token = tuple[bytes, bytes, float]
"""Key, value and stored score."""


def make_cache(
    *,
    blocks: int = 24,
    block_size: int = 8,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    window: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> KVCache:
    """A pool whose every slot holds random numbers, in use or not."""
    cache = KVCache(
        KVCacheSpec(
            num_layers=layers,
            num_blocks=blocks,
            block_size=block_size,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            device=torch.device("cpu"),
            window=window,
            num_query_slots=2,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (cache.kv, cache.queries, cache.scores):
        tensor.normal_(generator=generator)
    cache.scores.abs_()
    cache.positions.fill_(-7)
    return cache


def clone(cache: KVCache) -> KVCache:
    return moved(cache, cache.spec.device)


def moved(cache: KVCache, device: str | torch.device) -> KVCache:
    """A copy on another device."""
    copy = KVCache(replace(cache.spec, device=torch.device(device)))
    for name in ("kv_bits", "kv_scales", "scores", "positions", "queries"):
        getattr(copy, name).copy_(getattr(cache, name))
    return copy


def quantised(cache: KVCache) -> KVCache:
    """A copy with keys and values in fp8; the scale of every head is another one."""
    copy = KVCache(replace(cache.spec, kv_dtype=torch.float8_e4m3fn))
    for name in ("scores", "positions", "queries"):
        getattr(copy, name).copy_(getattr(cache, name))
    largest = cache.kv.abs().amax(dim=(1, 4, 5)).float()
    heads = torch.arange(largest.numel()).view(largest.shape)
    copy.kv_scales.copy_(scales_for(largest * 2.0 ** (heads % 5), cache.spec.dtype))
    copy.kv_bits.copy_(quantise(cache.kv, copy.kv_scales[:, None, :, :, None, None]))
    return copy


def make_job(
    cache: KVCache,
    *,
    length: int,
    num_targets: int,
    new_blocks: int = 0,
    num_scored: int = 0,
    num_tokens: int | None = None,
    prompt_len: int = 1,
    seed: int = 0,
) -> CompressionJob:
    """A job over random blocks. Stored positions of scored slots are drawn in random order.

    Args:
        new_blocks: how many of the targets, drawn at random, are not source blocks.
    """
    b = cache.spec.block_size
    draw = random.Random(seed)
    free = draw.sample(range(cache.spec.num_blocks), cache.spec.num_blocks)
    source, free = free[: -(-length // b)], free[-(-length // b) :]
    target = source[:num_targets]
    for index, block in zip(draw.sample(range(num_targets), new_blocks), free, strict=False):
        target[index] = block
    num_tokens = length if num_tokens is None else num_tokens
    if num_scored:
        evicted = num_tokens - length
        for layer in range(cache.spec.num_layers):
            for head in range(cache.spec.num_kv_heads):
                drawn = draw.sample(range(evicted + num_scored), num_scored)
                for slot, position in enumerate(drawn):
                    cache.positions[layer, source[slot // b], head, slot % b] = position
    return CompressionJob(
        request_id=f"request-{seed}",
        source_blocks=tuple(source),
        target_blocks=tuple(target),
        length=length,
        keep=num_targets * b,
        query_slot=1,
        num_scored=num_scored,
        num_tokens=num_tokens,
        prompt_len=prompt_len,
        compression_index=int(num_scored > 0),
    )


def gather(state: torch.Tensor, blocks: Sequence[int], length: int) -> torch.Tensor:
    """Paged ``[L, N, H, b, ...]`` -> dense ``[L, H, length, ...]``."""
    b = state.shape[3]
    block_of_slot = torch.tensor([blocks[t // b] for t in range(length)])
    return state[:, block_of_slot, :, torch.arange(length) % b].movedim(0, 2)


def keys_of(cache: KVCache, blocks: Sequence[int], length: int) -> torch.Tensor:
    """``[L, H, length, D]``."""
    return _tokens_of(cache, 0, blocks, length)


def values_of(cache: KVCache, blocks: Sequence[int], length: int) -> torch.Tensor:
    """``[L, H, length, D]``."""
    return _tokens_of(cache, 1, blocks, length)


def _tokens_of(cache: KVCache, index: int, blocks: Sequence[int], length: int) -> torch.Tensor:
    bits = gather(cache.kv_bits[:, :, index], blocks, length)
    if not cache.spec.is_quantised:
        return bits
    return dequantise(bits, cache.kv_scales[:, index, :, None, None], cache.spec.dtype)


def positions_before(cache: KVCache, job: CompressionJob) -> torch.Tensor:
    """``[L, H, T]`` text positions of the cached tokens, from the job's contract."""
    positions = gather(cache.positions, job.source_blocks, job.length)
    for slot in range(job.num_scored, job.length):
        positions[:, :, slot] = job.num_tokens - job.length + slot
    return positions


def tokens_by_position(
    cache: KVCache, blocks: Sequence[int], positions: torch.Tensor, scores: torch.Tensor
) -> list[dict[int, Token]]:
    """For each layer and head: text position -> the token found there."""
    length = positions.shape[-1]
    keys = keys_of(cache, blocks, length).contiguous().view(torch.uint8).numpy()
    values = values_of(cache, blocks, length).contiguous().view(torch.uint8).numpy()
    found = []
    for layer in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            order = positions[layer, head].tolist()
            assert len(set(order)) == length, "a position is there twice"
            stored = scores[layer, head].tolist()
            found.append(
                {
                    position: (
                        keys[layer, head, t].tobytes(),
                        values[layer, head, t].tobytes(),
                        stored[t],
                    )
                    for t, position in enumerate(order)
                }
            )
    return found


def tokens_after(cache: KVCache, job: CompressionJob) -> list[dict[int, Token]]:
    """What a finished job left in its target blocks."""
    return tokens_by_position(
        cache,
        job.target_blocks,
        gather(cache.positions, job.target_blocks, job.keep),
        gather(cache.scores, job.target_blocks, job.keep),
    )


def kept_positions(cache: KVCache, job: CompressionJob) -> torch.Tensor:
    """``[L, H, keep]`` text positions of the survivors, ascending."""
    return gather(cache.positions, job.target_blocks, job.keep).sort(-1).values
