"""Moving survivors: every token with what belongs to it, and nothing else touched."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression.cached_request import (
    HAS_COMPILER,
    clone,
    gather,
    make_cache,
    make_job,
    positions_before,
    tokens_after,
    tokens_by_position,
)
from zipage.cache.kv_cache import KVCache
from zipage.compression.compactor import move_tokens, plan_holes, plan_stable
from zipage.compression.job import CompressionJob
from zipage.compression.native import NativeKernels
from zipage.compression.select import select_tokens

BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")),
]


def compact(
    backend: str,
    cache: KVCache,
    job: CompressionJob,
    scores: torch.Tensor,
    stored: torch.Tensor | None,
    stable: bool,
) -> None:
    window = cache.spec.window
    if backend == "native":
        NativeKernels(cache).select_and_compact(job, scores, stored, window, 0, stable)
        return
    positions = positions_before(cache, job)
    kept = select_tokens(scores, positions, job.keep, window, 0)
    slots = plan_stable(kept, job.keep) if stable else plan_holes(kept, job.keep)
    move_tokens(cache, job.source_blocks, job.target_blocks, slots, positions, stored)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), stable=st.booleans())
def test_random_jobs(backend: str, seed: int, stable: bool) -> None:
    """Block sizes 4-64, partial last blocks, many surplus blocks, targets of every kind."""
    draw = random.Random(seed)
    b = draw.choice([4, 5, 8, 16, 64])
    window = draw.randint(1, 4)
    source = draw.randint(2, 12)
    length = (source - 1) * b + draw.randint(1, b)
    num_targets = draw.randint(1, (length - 1) // b)
    cache = make_cache(
        blocks=30, block_size=b, window=window, dim=draw.choice([4, 16, 24]), seed=seed
    )
    num_scored = draw.choice([0, draw.randint(0, length)])
    job = make_job(
        cache,
        length=length,
        num_targets=num_targets,
        new_blocks=draw.randint(0, num_targets),
        num_scored=num_scored,
        num_tokens=length + (draw.randint(0, 40) if num_scored else 0),
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 2, length, generator=generator)
    stored = torch.rand(2, 2, length, generator=generator) if draw.random() < 0.8 else None
    positions = positions_before(cache, job)
    before = clone(cache)
    expected = tokens_by_position(
        cache,
        job.source_blocks,
        positions,
        torch.zeros(2, 2, length) if stored is None else stored,
    )

    compact(backend, cache, job, scores, stored, stable)

    kept = select_tokens(scores, positions, job.keep, window, 0)
    after = tokens_after(cache, job)
    for index, tokens in enumerate(after):
        layer, head = divmod(index, 2)
        survivors = set(positions[layer, head][kept[layer, head]].tolist())
        assert tokens == {position: expected[index][position] for position in survivors}

    others = [block for block in range(30) if block not in job.target_blocks]
    assert torch.equal(cache.kv[:, others], before.kv[:, others])
    assert torch.equal(cache.scores[:, others], before.scores[:, others])
    assert torch.equal(cache.positions[:, others], before.positions[:, others])
    assert torch.equal(cache.queries, before.queries)

    now = gather(cache.positions, job.target_blocks, job.keep)
    if stable:
        for layer in range(2):
            for head in range(2):
                assert torch.equal(now[layer, head], positions[layer, head][kept[layer, head]])
    else:
        stayed_in_place(kept, positions, now)


def stayed_in_place(kept: torch.Tensor, positions: torch.Tensor, now: torch.Tensor) -> None:
    """Survivors among the first slots keep their slot, also where the block is a new one."""
    keep = now.shape[-1]
    stays = kept[..., :keep]
    assert torch.equal(now[stays], positions[..., :keep][stays])


@pytest.mark.parametrize("backend", BACKENDS)
def test_holes_leave_unmoved_tokens_alone(backend: str) -> None:
    """Nothing but the holes is written: at most one block of tokens per layer and head."""
    cache = make_cache()
    job = make_job(cache, length=64, num_targets=7)
    before = clone(cache)
    scores = torch.rand(2, 2, 64, generator=torch.Generator().manual_seed(0))
    compact(backend, cache, job, scores, None, False)
    changed = (cache.kv != before.kv).any(-1).sum(dim=(1, 4))  # [L, 2, H]
    assert (changed <= 8).all()
    assert changed.sum() > 0


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
@pytest.mark.parametrize("stable", [True, False])
def test_native_equals_torch_slot_for_slot(stable: bool) -> None:
    for seed in range(20):
        cache = make_cache(seed=seed)
        job = make_job(
            cache,
            length=61,
            num_targets=5,
            new_blocks=seed % 3,
            num_scored=40,
            num_tokens=100,
            seed=seed,
        )
        other = clone(cache)
        scores = torch.rand(2, 2, 61, generator=torch.Generator().manual_seed(seed))
        compact("torch", cache, job, scores, scores, stable)
        compact("native", other, job, scores, scores, stable)
        for name in ("kv", "scores", "positions"):
            assert torch.equal(getattr(cache, name), getattr(other, name))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_native_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            cache = make_cache()
            job = make_job(cache, length=61, num_targets=5)
            scores = torch.rand(2, 2, 61, generator=torch.Generator().manual_seed(0))
            compact("native", cache, job, scores, scores, True)
            results.append(cache)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(other.kv, results[0].kv)
        assert torch.equal(other.positions, results[0].positions)
