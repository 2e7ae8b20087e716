"""Torch scores against float64 loops, native scores against torch."""

from __future__ import annotations

import pytest
import torch

from tests.compression import naive
from tests.compression.cached_request import (
    HAS_COMPILER,
    keys_of,
    make_cache,
    make_job,
    positions_before,
)
from zipage.cache.kv_cache import KVCache
from zipage.compression import scores
from zipage.compression.job import CompressionJob
from zipage.compression.native import NativeKernels

needs_native = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")

REDUCTIONS = [(group, window) for group in ("max", "mean") for window in ("max", "mean")]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-9)


def inputs(cache: KVCache, job: CompressionJob) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and positions as the torch functions take them."""
    return (
        cache.queries[:, job.query_slot],
        keys_of(cache, job.source_blocks, job.length),
        positions_before(cache, job),
    )


@pytest.mark.parametrize(("group", "window"), REDUCTIONS)
def test_attention_is_the_formula(group: str, window: str) -> None:
    cache = make_cache(group=3, window=5)
    queries, keys, _ = inputs(cache, make_job(cache, length=37, num_targets=4))
    got = scores.window_attention(queries, keys, 0.25, group, window)
    assert got.dtype == torch.float32
    assert_close(got, naive.attention(queries, keys, 0.25, group, window))


def test_mean_attention_sums_to_one() -> None:
    cache = make_cache()
    queries, keys, _ = inputs(cache, make_job(cache, length=40, num_targets=4))
    total = scores.window_attention(queries, keys, 0.25, "mean", "mean").sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("tau", "threshold"), [(0.4, 0.5), (1.0, 0.0), (0.1, 0.2)])
def test_redundancy_is_the_formula(local: bool, tau: float, threshold: float) -> None:
    # 6 dimensions: many pairs above the threshold. Positions in random order.
    cache = make_cache(dim=6)
    job = make_job(cache, length=37, num_targets=4, num_scored=32, num_tokens=60)
    _, keys, positions = inputs(cache, job)
    got = scores.redundancy(keys, positions, 8, local, tau, threshold)
    assert_close(got, naive.redundancy(keys, positions, 8, local, tau, threshold))


@pytest.mark.parametrize("local", [True, False])
def test_chunking_changes_nothing(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(layers=3, dim=6)
    queries, keys, positions = inputs(cache, make_job(cache, length=37, num_targets=4))
    whole = (
        scores.window_attention(queries, keys, 0.25),
        scores.redundancy(keys, positions, 8, local, 0.4, 0.5),
    )
    monkeypatch.setattr(scores, "_CHUNK_ELEMENTS", 600)
    assert_close(scores.window_attention(queries, keys, 0.25), whole[0])
    assert_close(scores.redundancy(keys, positions, 8, local, 0.4, 0.5), whole[1])


@pytest.mark.parametrize("local", [True, False])
def test_newest_near_duplicate_is_spared(local: bool) -> None:
    """Of three copies the newest by text position, not by slot, gets no redundancy."""
    keys = torch.eye(8).view(1, 1, 8, 8).clone()
    keys[0, 0, 1] = keys[0, 0, 4] = keys[0, 0, 6]
    positions = torch.tensor([0, 9, 2, 3, 4, 5, 6, 7]).view(1, 1, 8)
    r = scores.redundancy(keys, positions, 8, local, 0.4, 0.5)[0, 0]
    assert r.argmin() in (0, 1, 2, 3, 5, 7)
    torch.testing.assert_close(r[1], r[0])  # as low as a token without copies
    assert r[4] > r[0] * 1.2
    assert r[6] > r[0] * 1.2


def fill_keys(cache: KVCache, what: str) -> None:
    if what == "zero":
        cache.kv.zero_()
        cache.queries.zero_()
    elif what == "equal":
        cache.kv.fill_(0.7)
        cache.queries.fill_(0.3)
    elif what == "some zero":
        cache.kv[:, ::2] = 0
    elif what == "large":
        # logits of hundreds: all but a few weights underflow
        cache.kv.mul_(40)
        cache.queries.mul_(40)


@pytest.mark.parametrize("what", ["zero", "equal", "some zero", "large"])
@pytest.mark.parametrize("use_native", [False, pytest.param(True, marks=needs_native)])
def test_degenerate_keys_give_finite_scores(what: str, use_native: bool) -> None:
    cache = make_cache(blocks=12)
    fill_keys(cache, what)
    job = make_job(cache, length=61, num_targets=6)
    queries, keys, positions = inputs(cache, job)
    if use_native:
        kernels = NativeKernels(cache)
        a = kernels.attention(job, 0.25, "max", "mean")
        local, raw = (kernels.redundancy(job, local, 0.4, 0.5) for local in (True, False))
    else:
        a = scores.window_attention(queries, keys, 0.25, "max", "mean")
        local, raw = (
            scores.redundancy(keys, positions, 8, local, 0.4, 0.5) for local in (True, False)
        )
    for x in (a, local, raw):
        assert x.isfinite().all()
    if what == "large":
        torch.testing.assert_close(
            a.double(), naive.attention(queries, keys, 0.25, "max", "mean"), rtol=1e-3, atol=1e-7
        )
    else:
        assert_close(a, naive.attention(queries, keys, 0.25, "max", "mean"))
    if what == "zero":
        assert_close(raw, torch.full_like(raw, 1 / 61))
        assert_close(local, torch.full_like(local, 1 / 61))


SHAPES = [
    # block, dim, group, window, length: vector widths, panels and tails of every kind
    (4, 8, 1, 3, 22),
    (8, 24, 3, 5, 61),
    (16, 64, 4, 16, 96),
    (16, 64, 4, 16, 89),
    (48, 80, 7, 20, 401),
    (64, 64, 4, 16, 576),
    (64, 128, 2, 33, 130),
    (96, 20, 9, 8, 500),
]


@needs_native
@pytest.mark.parametrize(("block", "dim", "group", "window", "length"), SHAPES)
def test_native_scores_equal_torch(
    block: int, dim: int, group: int, window: int, length: int
) -> None:
    blocks = -(-length // block)
    cache = make_cache(
        blocks=blocks + 2, block_size=block, dim=dim, group=group, window=window, seed=length
    )
    # A direction common to all keys, as real ones have, puts many pairs above the threshold.
    cache.kv[:, :, 0] += torch.randn(dim, generator=torch.Generator().manual_seed(1))
    scored = (blocks - 1) * block
    job = make_job(cache, length=length, num_targets=1, num_scored=scored, num_tokens=length + 300)
    queries, keys, positions = inputs(cache, job)
    kernels = NativeKernels(cache)
    for reductions in REDUCTIONS:
        assert_close(
            kernels.attention(job, dim**-0.5, *reductions),
            scores.window_attention(queries, keys, dim**-0.5, *reductions),
        )
    for local in (True, False):
        for tau, threshold in ((0.4, 0.5), (0.1, 0.3)):
            assert_close(
                kernels.redundancy(job, local, tau, threshold),
                scores.redundancy(keys, positions, block, local, tau, threshold),
            )


@needs_native
def test_native_scores_do_not_depend_on_threads() -> None:
    cache = make_cache(blocks=12, layers=3, block_size=16, dim=32)
    job = make_job(cache, length=150, num_targets=8)
    kernels = NativeKernels(cache)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                (
                    kernels.attention(job, 0.2, "max", "mean"),
                    kernels.redundancy(job, True, 0.4, 0.5),
                    kernels.redundancy(job, False, 0.4, 0.5),
                )
            )
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


def test_max_pool() -> None:
    x = torch.rand(2, 3, 17, generator=torch.Generator().manual_seed(0))
    pooled = scores.max_pool(x, 5)
    for layer in range(2):
        for head in range(3):
            assert pooled[layer, head].tolist() == naive.max_pool(x[layer, head].tolist(), 5)
