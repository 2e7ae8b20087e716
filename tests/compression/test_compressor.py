"""Whole compressions, alone and one after another."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from tests.compression import naive
from tests.compression.cached_request import (
    HAS_COMPILER,
    clone,
    gather,
    kept_positions,
    keys_of,
    make_cache,
    make_job,
    positions_before,
    tokens_after,
    tokens_by_position,
)
from zipage.cache.kv_cache import KVCache
from zipage.compression import compressor as compressor_module
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.job import CompressionJob
from zipage.compression.kernels import KernelChoice, make_kernels
from zipage.compression.policies import make_policy, policy_names
from zipage.compression.policies.base import Policy, PolicyScores
from zipage.compression.view import CacheView
from zipage.errors import ConfigError

needs_native = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
KERNELS = ["torch", pytest.param("native", marks=needs_native)]
COMPACTIONS = ["stable", "holes"]


def make_compressor(
    cache: KVCache,
    policy: str = "zipage",
    *,
    kernels: KernelChoice = "torch",
    policy_options: dict[str, object] | None = None,
    **options: object,
) -> Compressor:
    common = CompressionOptions(window=cache.spec.window, **options)  # type: ignore[arg-type]
    made = make_policy(policy, policy_options or {})
    return Compressor(cache, made, common, cache.spec.head_dim**-0.5, kernels)


def append_tokens(cache: KVCache, job: CompressionJob, new_block: int, seed: int) -> CompressionJob:
    """The job of the same request once it has decoded another block of tokens."""
    b = cache.spec.block_size
    generator = torch.Generator().manual_seed(seed)
    shape = cache.kv[:, new_block].shape
    cache.kv[:, new_block] = torch.randn(shape, generator=generator).to(cache.kv.dtype)
    cache.queries.normal_(generator=generator)
    cache.positions[:, new_block] = -7  # stale, as in a pool
    cache.scores[:, new_block] = 1e6
    return replace(
        job,
        source_blocks=(*job.target_blocks, new_block),
        target_blocks=job.target_blocks,
        length=job.keep + b,
        num_scored=job.keep,
        num_tokens=job.num_tokens + b,
        compression_index=job.compression_index + 1,
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_three_compressions_in_a_row(kernels: KernelChoice, compaction: str) -> None:
    """Kept sets, positions, stored scores and contents against loops, with memory of scores."""
    cache = make_cache(dim=6)
    b, window, gamma = 8, 4, 0.8
    knobs = {"gamma": gamma, "lam": 1.0, "value_power": 0.0, "window_reduction": "mean"}
    compressor = make_compressor(
        cache, kernels=kernels, policy_options=knobs, compaction=compaction
    )
    job = make_job(cache, length=45, num_targets=5)
    text = {}  # what each position's token is, per layer and head
    remembered = [{} for _ in range(4)]  # position -> stored score
    free = [block for block in range(24) if block not in job.source_blocks]
    for step in range(3):
        positions = positions_before(cache, job)
        before = tokens_by_position(
            cache, job.source_blocks, positions, torch.zeros(positions.shape)
        )
        for index, tokens in enumerate(before):
            for position, (key, value, _) in tokens.items():
                assert text.setdefault((index, position), (key, value)) == (key, value)
        attention = naive.attention(
            cache.queries[:, job.query_slot],
            keys_of(cache, job.source_blocks, job.length),
            cache.spec.head_dim**-0.5,
            "max",
            "mean",
        )
        compressor.run(job)

        after = tokens_after(cache, job)
        for index in range(4):
            layer, head = divmod(index, 2)
            order = positions[layer, head].tolist()
            s = {
                position: max(
                    float(attention[layer, head, t]), gamma * remembered[index].get(position, 0.0)
                )
                for t, position in enumerate(order)
            }
            kept = naive.select([s[p] for p in order], order, job.keep, window, 0)
            survivors = {order[slot] for slot in kept}
            assert set(after[index]) == survivors
            remembered[index] = {p: after[index][p][2] for p in survivors}
            for position in survivors:
                assert after[index][position][:2] == text[index, position]
                assert after[index][position][2] == pytest.approx(s[position], rel=1e-5)
        newest = set(range(job.num_tokens - window, job.num_tokens))
        assert all(newest <= set(tokens) for tokens in after)
        job = append_tokens(cache, job, free[step], seed=step)
    assert job.num_scored == 5 * b


@pytest.mark.parametrize("policy", policy_names())
def test_plans_keep_the_same_tokens(policy: str) -> None:
    caches = [make_cache(dim=6) for _ in COMPACTIONS]
    job = make_job(caches[0], length=61, num_targets=5, new_blocks=2, num_scored=40, num_tokens=90)
    caches[1] = clone(caches[0])
    found = []
    for cache, compaction in zip(caches, COMPACTIONS, strict=True):
        make_compressor(cache, policy, compaction=compaction).run(job)
        found.append(tokens_after(cache, job))
    assert found[0] == found[1]


@needs_native
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_native_keeps_what_torch_keeps(policy: str, compaction: str) -> None:
    """Equal sets, but for tokens whose scores are within 1e-6 of the last one kept."""
    for seed in range(4):
        reference = make_cache(blocks=40, block_size=16, dim=32, group=4, window=16, seed=seed)
        reference.kv[:, :, 0] += torch.randn(32, generator=torch.Generator().manual_seed(seed))
        job = make_job(
            reference,
            length=300,
            num_targets=12,
            num_scored=224 if seed % 2 else 0,
            num_tokens=300 + 100 * (seed % 2),
            seed=seed,
        )
        positions = positions_before(reference, job)
        view = CacheView(reference, job, 32**-0.5, 16, 0)
        final = make_policy(policy, {}).scores(view).final
        of_position = [
            dict(zip(positions[layer, head].tolist(), final[layer, head].tolist(), strict=True))
            for layer in range(2)
            for head in range(2)
        ]
        fast = clone(reference)
        make_compressor(reference, policy, compaction=compaction).run(job)
        make_compressor(fast, policy, kernels="native", compaction=compaction).run(job)
        for scores, one, other in zip(
            of_position, tokens_after(reference, job), tokens_after(fast, job), strict=True
        ):
            last = sorted(scores.values(), reverse=True)[job.keep - 1]
            for position in one.keys() ^ other.keys():
                assert scores[position] == pytest.approx(last, rel=1e-6, abs=1e-6 * abs(last))
            for position in one.keys() & other.keys():
                assert one[position][:2] == other[position][:2]
                assert one[position][2] == pytest.approx(other[position][2], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_streaming_keeps_sinks_and_recent(kernels: KernelChoice, compaction: str) -> None:
    cache = make_cache()
    compressor = make_compressor(cache, "streaming", kernels=kernels, compaction=compaction)
    job = make_job(cache, length=61, num_targets=5)
    free = [block for block in range(24) if block not in job.source_blocks]
    for step in range(4):
        compressor.run(job)
        recent = range(job.num_tokens - (job.keep - 4), job.num_tokens)
        expected = torch.tensor([0, 1, 2, 3, *recent], dtype=torch.int32)
        assert torch.equal(kept_positions(cache, job), expected.expand(2, 2, -1))
        job = append_tokens(cache, job, free[step], seed=step)


@pytest.mark.parametrize("kernels", KERNELS)
def test_window_sinks_and_prompt_are_protected(kernels: KernelChoice) -> None:
    """Against a policy that would rather keep anything else, for three compressions."""
    for options, protected in (
        ({"num_sinks": 3}, 3),
        ({"protect_prompt": 0.25}, 10),
        ({"protect_prompt": 0.2, "num_sinks": 2}, 2),  # a prompt of 10 is over 0.2 x 40
        ({"protect_prompt": 0.5, "num_sinks": 30}, 30),
    ):
        cache = make_cache()
        cache.kv[:, :, 0].zero_()  # equal scores, and the newer wins: old tokens go first
        compressor = make_compressor(
            cache,
            policy_options={"lam": 1.0, "value_power": 0.0},
            kernels=kernels,
            **options,
        )
        job = make_job(cache, length=61, num_targets=5, prompt_len=10)
        free = [block for block in range(24) if block not in job.source_blocks]
        for step in range(3):
            compressor.run(job)
            kept = kept_positions(cache, job)
            assert torch.equal(
                kept[..., :protected],
                torch.arange(protected, dtype=torch.int32).expand(2, 2, -1),
            )
            assert (kept[..., protected] > protected).all()
            newest = torch.arange(job.num_tokens - 4, job.num_tokens, dtype=torch.int32)
            assert torch.equal(kept[..., -4:], newest.expand(2, 2, -1))
            job = append_tokens(cache, job, free[step], seed=step)
            cache.kv[:, free[step], 0].zero_()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("fill", [0.0, 0.7])
@pytest.mark.parametrize("policy", policy_names())
def test_equal_keys(policy: str, fill: float, kernels: KernelChoice) -> None:
    """All-equal and all-zero keys: a full pack of distinct tokens, the window among them."""
    cache = make_cache()
    cache.kv[:, :, 0].fill_(fill)
    job = make_job(cache, length=61, num_targets=5)
    make_compressor(cache, policy, kernels=kernels).run(job)
    assert gather(cache.scores, job.target_blocks, job.keep).isfinite().all()
    for tokens in tokens_after(cache, job):
        assert len(tokens) == 40
        assert set(range(57, 61)) <= set(tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools(dtype: torch.dtype) -> None:
    """Scores are fp32 whatever the pool; moved tokens keep their bits."""
    cache = make_cache(dtype=dtype, dim=32)
    full = make_cache(dim=32)
    full.kv.copy_(cache.kv)
    full.queries.copy_(cache.queries)
    job = make_job(cache, length=61, num_targets=5)
    assert make_job(full, length=61, num_targets=5) == job
    before = tokens_by_position(
        cache, job.source_blocks, positions_before(cache, job), torch.zeros(2, 2, 61)
    )
    make_compressor(cache, "zipage-paper", kernels="auto").run(job)
    make_compressor(full, "zipage-paper").run(job)
    assert torch.equal(cache.positions, full.positions)
    assert torch.equal(cache.scores, full.scores)
    for old, new in zip(before, tokens_after(cache, job), strict=True):
        for position, (key, value, _) in new.items():
            assert old[position][:2] == (key, value)


@pytest.mark.parametrize("kernels", KERNELS)
def test_requests_do_not_see_each_other(kernels: KernelChoice) -> None:
    """Eight jobs at once from eight threads, in one pool, as one by one."""
    cache = make_cache(blocks=72, block_size=16, dim=32)
    everything = list(range(72))
    jobs = [
        CompressionJob(
            request_id=str(i),
            source_blocks=tuple(everything[i * 8 : i * 8 + 7]),
            target_blocks=(everything[i * 8 + 7], *everything[i * 8 + 1 : i * 8 + 5]),
            length=110,
            keep=80,
            query_slot=i % 2,
            num_scored=0,
            num_tokens=110,
            prompt_len=20,
            compression_index=0,
        )
        for i in range(8)
    ]
    together = clone(cache)
    options = {"kernels": kernels, "policy_options": {"lam": 0.5}}
    one_by_one = make_compressor(cache, **options)
    for job in jobs:
        one_by_one.run(job)
    compressor = make_compressor(together, **options)
    threads = [threading.Thread(target=compressor.run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("kv", "scores", "positions"):
        assert torch.equal(getattr(cache, name), getattr(together, name))


KERNELS_AND_POLICIES = [
    (kernels, policy) for kernels in ("torch", "native") for policy in policy_names()
]
needs = {
    "native": needs_native,
    "triton": pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
    ),
}


@pytest.mark.parametrize(
    ("kernels", "policy"),
    [
        pytest.param(kernels, policy, marks=needs.get(kernels, ()))
        for kernels, policy in [*KERNELS_AND_POLICIES, ("triton", "zipage")]
    ],
)
def test_layers_apart_give_what_they_give_together(
    kernels: KernelChoice, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers, two at once and then one: the first compression, and one after it."""
    cache = make_cache(layers=3)
    compaction = "stable" if policy in ("rkv", "h2o") else "holes"
    compressor = make_compressor(
        cache, policy, kernels=kernels, compaction=compaction, protect_prompt=0.5, num_sinks=2
    )
    parts: list[tuple[int, int]] = []
    run_layers = compressor._run_layers

    def noted(job: CompressionJob, first: int, last: int) -> bool:
        parts.append((first, last))
        return run_layers(job, first, last)

    monkeypatch.setattr(compressor, "_run_layers", noted)
    job = make_job(cache, length=45, num_targets=5)
    jobs = [job] if kernels == "triton" else [job, append_tokens(cache, job, 23, seed=1)]
    apart = clone(cache)
    results = []
    for pool, at_once in ((cache, 3), (apart, 2)):
        compressor.cache = pool
        if compressor._kernels is not None:
            compressor._kernels = make_kernels(pool, kernels, None)
        monkeypatch.setattr(compressor, "_layers_at_once", lambda length, n=at_once: n)
        for each in jobs:
            compressor.run(each)
        results.append([pool.kv, pool.scores, pool.positions])
    assert parts == [(0, 3)] * len(jobs) + [(0, 2), (2, 3)] * len(jobs)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
def test_scratch_is_bounded(kernels: KernelChoice) -> None:
    """However long a cache is, so many layers are scored at once that `SCRATCH_BYTES` hold it."""
    compressor = make_compressor(make_cache(layers=36, kv_heads=8, blocks=4), kernels=kernels)
    at_once = [compressor._layers_at_once(length) for length in (100, 2112, 10**5, 10**7)]
    assert at_once[0] == 36 and at_once == sorted(at_once, reverse=True) and at_once[-1] == 1
    assert 1 < at_once[2] < 36 or kernels == "torch"
    for length, layers in zip((100, 2112, 10**5), at_once, strict=False):
        assert layers == 1 or layers * length * 8 * 40 <= compressor_module.SCRATCH_BYTES


class _Short:
    """A policy for which memory is short when it sees more than some layers at once."""

    def __init__(self, inner: Policy, most: int) -> None:
        self.inner, self.most = inner, most
        self.seen: list[int] = []

    def scores(self, view: CacheView) -> PolicyScores:
        self.seen.append(view.num_layers)
        result = self.inner.scores(view)
        if view.num_layers > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result


@pytest.mark.parametrize("kernels", KERNELS)
def test_out_of_memory_takes_fewer_layers_at_once(kernels: KernelChoice) -> None:
    cache = make_cache(layers=5)
    expected = clone(cache)
    job = make_job(cache, length=45, num_targets=5)
    make_compressor(expected, kernels=kernels).run(job)
    compressor = make_compressor(cache, kernels=kernels)
    short = _Short(compressor.policy, 1)
    compressor.policy = short  # type: ignore[assignment]
    compressor.run(job)
    assert short.seen == [5, 2, 1, 1, 3, 1, 2, 1, 1]
    for name in ("kv", "scores", "positions"):
        assert torch.equal(getattr(cache, name), getattr(expected, name))
    short.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        compressor.run(job)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"compaction": "none"},
        {"num_sinks": -1},
        {"protect_prompt": 1.5},
        {"protect_prompt": float("nan")},
    ],
)
def test_illegal_options_are_refused(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        CompressionOptions(**options)  # type: ignore[arg-type]


def test_options_must_fit_the_pool() -> None:
    cache = make_cache(dtype=torch.bfloat16)
    policy = make_policy("zipage", {})
    with pytest.raises(ConfigError, match=r"window is 16 but .* hold 4"):
        Compressor(cache, policy, CompressionOptions(), 0.25)
    with pytest.raises(ConfigError, match=r"float32, got cpu and torch.bfloat16"):
        Compressor(cache, policy, CompressionOptions(window=4), 0.25, kernels="native")


@pytest.mark.parametrize(
    "change",
    [
        {"keep": 39},
        {"length": 40},
        {"length": 65},
        {"length": 56},
        {"num_tokens": 60},
        {"num_scored": 62},
        {"query_slot": 2},
        {"source_blocks": (0, 1, 2, 3, 4, 5, 6, 6)},
        {"source_blocks": (0, 1, 2, 3, 4, 5, 6, 24)},
        {"target_blocks": (0, 1, 2, 3, -1)},
        {"target_blocks": (0, 1, 2, 3, 3)},
    ],
)
def test_impossible_jobs_touch_nothing(change: dict[str, object]) -> None:
    cache = make_cache()
    before = clone(cache)
    job = replace(make_job(cache, length=61, num_targets=5), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="request-0: impossible"):
        make_compressor(cache, kernels="auto").run(job)
    assert torch.equal(cache.kv, before.kv)
    assert torch.equal(cache.positions, before.positions)
