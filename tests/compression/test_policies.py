"""Policies: their formulas from the parts tested elsewhere, and their options."""

from __future__ import annotations

import pytest
import torch

from tests.compression import naive
from tests.compression.cached_request import gather, make_cache, make_job, positions_before
from zipage.cache.kv_cache import KVCache
from zipage.compression.job import CompressionJob
from zipage.compression.policies import default_window, make_policy, policy_names
from zipage.compression.policies.zipage import ZipagePolicy
from zipage.compression.view import CacheView
from zipage.config import FULL
from zipage.errors import ConfigError


def view_of(cache: KVCache, job: CompressionJob, seed: int = 0) -> CacheView:
    return CacheView(cache, job, 0.25, cache.spec.window, seed)


@pytest.fixture
def first() -> CacheView:
    cache = make_cache(dim=6)
    return view_of(cache, make_job(cache, length=45, num_targets=4))


@pytest.fixture
def later() -> CacheView:
    """A view after an earlier compression, slots in random text order."""
    cache = make_cache(dim=6)
    return view_of(cache, make_job(cache, length=45, num_targets=4, num_scored=32, num_tokens=77))


def pooled_by_text(view: CacheView, values: torch.Tensor, kernel: int) -> torch.Tensor:
    out = torch.empty_like(values)
    for layer in range(values.shape[0]):
        for head in range(values.shape[1]):
            order = sorted(range(view.length), key=view.positions[layer, head].tolist().__getitem__)
            pooled = naive.max_pool([float(values[layer, head, t]) for t in order], kernel)
            for rank, t in enumerate(order):
                out[layer, head, t] = pooled[rank]
    return out


def test_view_is_the_cache() -> None:
    cache = make_cache()
    job = make_job(cache, length=45, num_targets=4, num_scored=32, num_tokens=77, prompt_len=9)
    view = view_of(cache, job)
    assert torch.equal(view.keys, gather(cache.kv[:, :, 0], job.source_blocks, 45))
    assert torch.equal(view.values, gather(cache.kv[:, :, 1], job.source_blocks, 45))
    assert torch.equal(view.queries, cache.queries[:, 1])
    assert torch.equal(view.positions, positions_before(cache, job))
    stored = gather(cache.scores, job.source_blocks, 45)
    assert torch.equal(view.stored_scores[..., :32], stored[..., :32])
    assert (view.stored_scores[..., 32:] == 0).all()
    assert view.scored.tolist() == [True] * 32 + [False] * 13
    assert (view.first, view.prompt_len, view.num_tokens) == (False, 9, 77)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_copies_its_own_blocks_only(dtype: torch.dtype) -> None:
    cache = make_cache(blocks=1000, dtype=dtype)
    view = view_of(cache, make_job(cache, length=45, num_targets=4))
    with torch.profiler.profile(profile_memory=True) as profile:
        tensors = [view.keys, view.values, view.positions, view.stored_scores]
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert sum(t.nbytes for t in tensors) <= allocated < cache.kv.nbytes / 20


def test_zipage_defaults(first: CacheView, later: CacheView) -> None:
    """Window maximum weighted by value norms, and redundancy at weight 0.3; no memory."""
    for view in (first, later):
        final, stored = make_policy("zipage", {}).scores(view)
        norms = view.values.double().norm(dim=-1)
        weighted = view.attention("max", "max") * (norms / norms.mean(-1, keepdim=True)).float()
        assert stored is not None
        torch.testing.assert_close(stored, weighted)
        torch.testing.assert_close(final, 0.7 * weighted - 0.3 * view.redundancy(True, 0.4, 0.5))
    assert make_policy("zipage", {}).default_window == 24
    assert default_window("zipage-paper") == default_window("streaming") == 16


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_value_power(first: CacheView, power: float) -> None:
    final, _ = make_policy("zipage", {"value_power": power, "lam": 1.0}).scores(first)
    norms = first.values.double().norm(dim=-1)
    weight = (norms / norms.mean(-1, keepdim=True)).pow(power).float()
    torch.testing.assert_close(final, first.attention("max", "max") * weight)


def test_zero_values_score_zero(first: CacheView) -> None:
    first.values.zero_()
    final, _ = make_policy("zipage", {"lam": 1.0}).scores(first)
    assert torch.equal(final, torch.zeros_like(final))


@pytest.mark.parametrize("redundancy", ["lightning", "raw"])
def test_zipage_first_compression(first: CacheView, redundancy: str) -> None:
    policy = make_policy(
        "zipage",
        {"group": "mean", "window_reduction": "max", "first_pooling": 3, "lam": 0.3, "gamma": 0.8}
        | {"value_power": 0.0}
        | {"redundancy": redundancy, "tau": 0.2, "threshold": 0.4},
    )
    final, stored = policy.scores(first)
    a = first.attention("mean", "max")
    r = first.redundancy(redundancy == "lightning", 0.2, 0.4)
    assert stored is not None
    assert torch.equal(stored, a)
    torch.testing.assert_close(final, 0.3 * pooled_by_text(first, a, 3) - 0.7 * r)


@pytest.mark.parametrize("later_pooling", [1, 5])
def test_zipage_later_compression(later: CacheView, later_pooling: int) -> None:
    policy = make_policy(
        "zipage",
        {"first_pooling": 7, "later_pooling": later_pooling, "lam": 0.3, "gamma": 0.1}
        | {"value_power": 0.0, "window_reduction": "mean"},
    )
    final, stored = policy.scores(later)
    a = later.attention("max", "mean")
    old = 0.1 * later.stored_scores
    assert (old > a)[..., :32].any()
    assert (a > old)[..., :32].any()
    assert stored is not None
    assert torch.equal(stored, torch.maximum(a, old))
    s = torch.maximum(pooled_by_text(later, a, later_pooling), old)
    r = later.redundancy(True, 0.4, 0.5)
    torch.testing.assert_close(final, 0.3 * s - 0.7 * r)


def test_zipage_paper_is_zipage_with_published_options(later: CacheView, first: CacheView) -> None:
    paper = make_policy("zipage-paper", {})
    assert isinstance(paper, ZipagePolicy)
    spelt_out = make_policy(
        "zipage",
        {"lam": 0.2, "tau": 0.4, "gamma": 0.8, "first_pooling": 5, "threshold": 0.5}
        | {"later_pooling": 1, "group": "max", "window_reduction": "mean"}
        | {"redundancy": "lightning", "value_power": 0.0},
    )
    for view in (first, later):
        for one, other in zip(paper.scores(view), spelt_out.scores(view), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_rkv(later: CacheView) -> None:
    final, _ = make_policy("rkv", {}).scores(later)
    expected = 0.1 * later.attention("max", "mean") - 0.9 * later.redundancy(False, 0.4, 0.5)
    torch.testing.assert_close(final, expected)


def test_snapkv(later: CacheView) -> None:
    final, _ = make_policy("snapkv", {"pooling": 3}).scores(later)
    assert torch.equal(final, pooled_by_text(later, later.attention("mean", "mean"), 3))


def test_h2o_accumulates(first: CacheView, later: CacheView) -> None:
    policy = make_policy("h2o", {})
    assert torch.equal(policy.scores(first).final, first.attention("mean", "mean"))
    final, stored = policy.scores(later)
    torch.testing.assert_close(final, later.attention("mean", "mean") + later.stored_scores)
    assert stored is final


def test_block_scores_are_block_means(first: CacheView) -> None:
    final, _ = make_policy("block", {}).scores(first)
    a = first.attention("max", "mean")
    for start in range(0, 45, 8):
        end = min(start + 8, 45)
        mean = a[..., start:end].mean(-1, keepdim=True).expand(-1, -1, end - start)
        torch.testing.assert_close(final[..., start:end], mean)


def test_random_depends_on_tokens_seed_and_position_only(later: CacheView) -> None:
    policy = make_policy("random", {})
    final = policy.scores(later).final
    assert ((final >= 0) & (final < 1)).all()
    assert final.unique().numel() > 0.99 * final.numel()
    assert 0.4 < final.mean() < 0.6

    cache = make_cache(seed=99)  # other contents, other blocks, other slots of the same text
    other = view_of(cache, make_job(cache, length=77, num_targets=4, seed=5))
    drawn = policy.scores(other).final
    assert torch.equal(drawn.gather(-1, later.positions.long()), final)

    reseeded = view_of(cache, make_job(cache, length=77, num_targets=4, seed=5), seed=1)
    longer = view_of(cache, make_job(cache, length=78, num_targets=4, seed=5))
    for changed in (reseeded, longer):
        assert (policy.scores(changed).final[..., :77] != drawn).float().mean() > 0.99


def test_names() -> None:
    assert {"zipage", "zipage-paper", "rkv", "snapkv", "h2o", "streaming", "random"} <= {
        *policy_names()
    }
    assert FULL == "full"
    assert FULL not in policy_names()
    for name in policy_names():
        assert make_policy(name, {}).name == name


@pytest.mark.parametrize("name", ["full", "Zipage", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"legal are zipage, zipage-paper, rkv"):
        make_policy(name, {})


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'streaming' has no option 'lam'; legal are num_sinks"):
        make_policy("streaming", {"lam": 0.2})
    with pytest.raises(ConfigError, match=r"'random' has no option 'seed'; legal are none"):
        make_policy("random", {"seed": 2})


@pytest.mark.parametrize(
    ("option", "value", "legal"),
    [
        ("group", "sum", "'max' or 'mean'"),
        ("group", ["max"], "'max' or 'mean'"),
        ("redundancy", "none", "'lightning' or 'raw'"),
        ("first_pooling", 4, "an odd integer"),
        ("first_pooling", 0, "an odd integer"),
        ("later_pooling", 3.0, "an odd integer"),
        ("gamma", 1.2, "a number from 0 to 1"),
        ("gamma", None, "a number from 0 to 1"),
        ("lam", "0.2", "a number from 0 to 1"),
        ("lam", True, "a number from 0 to 1"),
        ("lam", float("nan"), "a number from 0 to 1"),
        ("tau", 0, "a number above 0"),
        ("tau", float("inf"), "a number above 0"),
    ],
)
def test_illegal_values_are_refused(option: str, value: object, legal: str) -> None:
    with pytest.raises(ConfigError, match=rf"option {option} must be {legal}"):
        make_policy("zipage", {option: value})
