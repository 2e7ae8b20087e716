"""The Triton compression kernels against the torch reference.

Interpreted on the CPU, where sizes are small and constants are lowered so that small caches have
several tiles; compiled, and on larger caches, where there is a CUDA device.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.compression.cached_request import (
    clone,
    keys_of,
    make_cache,
    make_job,
    moved,
    positions_before,
    quantised,
    tokens_after,
    values_of,
)
from tests.kernels.devices import DEVICES, SANITIZED, needs_cuda
from zipage.cache.kv_cache import KVCache
from zipage.compression import scores
from zipage.compression.compactor import move_tokens, plan_holes, plan_stable
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.job import CompressionJob
from zipage.compression.kernels import make_kernels
from zipage.compression.policies import make_policy, policy_names
from zipage.compression.select import select_tokens
from zipage.compression.view import CacheView
from zipage.errors import ConfigError

pytest.importorskip("triton")
from zipage.compression import triton_kernels
from zipage.compression.triton_kernels import TritonKernels
from zipage.kernels.triton import compaction, redundancy, window_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_cpu = pytest.mark.skipif(not INTERPRETED, reason="Triton compiles, and for CUDA only")
fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A cache and a job over it."""

    dtype: torch.dtype
    dim: int
    group: int
    block_size: int
    window: int
    length: int
    num_targets: int
    num_scored: int = 0
    layers: int = 1
    kv_heads: int = 2
    fp8: bool = False

    def make(self, seed: int = 0) -> tuple[KVCache, CompressionJob]:
        cache = make_cache(
            blocks=-(-self.length // self.block_size) + 8,
            block_size=self.block_size,
            layers=self.layers,
            kv_heads=self.kv_heads,
            group=self.group,
            dim=self.dim,
            window=self.window,
            dtype=self.dtype,
            seed=seed,
        )
        # Keys that resemble one another, so that redundancy has something to find.
        cache.kv[:, :, 0] += torch.randn(self.dim, generator=torch.Generator().manual_seed(seed))
        job = make_job(
            cache,
            length=self.length,
            num_targets=self.num_targets,
            new_blocks=min(2, self.num_targets),
            num_scored=self.num_scored,
            num_tokens=self.length + (50 if self.num_scored else 0),
            seed=seed,
        )
        return quantised(cache) if self.fp8 else cache, job


SMALL = [
    Case(fp32, 16, 1, 16, 4, 70, 3, num_scored=48, layers=2),
    Case(bf16, 80, 4, 48, 24, 150, 2),
    Case(fp16, 96, 7, 32, 5, 129, 3, num_scored=96),
    Case(fp32, 64, 3, 16, 1, 33, 1),
    Case(bf16, 64, 2, 16, 16, 64, 2, num_scored=64),
    Case(bf16, 40, 3, 16, 5, 60, 2, num_scored=48, fp8=True),
    Case(fp32, 16, 2, 16, 4, 45, 2, layers=2, fp8=True),
]
LARGE = [
    Case(bf16, 128, 4, 256, 24, 2304, 8, num_scored=2048, layers=3, kv_heads=8),
    Case(bf16, 64, 8, 64, 16, 5003, 7, layers=2),
    Case(fp16, 80, 7, 48, 24, 1001, 12, num_scored=720, layers=2),
    Case(bf16, 256, 1, 16, 32, 515, 30, layers=2),
    Case(fp32, 128, 4, 64, 24, 4601, 9, num_scored=640, layers=2),
    Case(bf16, 128, 4, 256, 24, 2304, 8, num_scored=2048, layers=3, kv_heads=8, fp8=True),
    Case(fp16, 80, 7, 48, 24, 1001, 12, num_scored=720, layers=2, fp8=True),
    Case(fp32, 64, 2, 64, 24, 515, 3, layers=2, fp8=True),
]
if SANITIZED:
    # Still several parts and plan tiles; one cache that is selected from in more than one tile,
    # which does not depend on its dtype.
    LARGE[0] = Case(bf16, 128, 4, 256, 24, 1280, 4, num_scored=1024, layers=2)
    LARGE[1] = Case(bf16, 64, 8, 64, 16, 4099, 7, kv_heads=1)
    LARGE[4] = Case(fp32, 128, 4, 64, 24, 1037, 9, num_scored=640)
    LARGE[5] = replace(LARGE[0], fp8=True)
CASES = [pytest.param("cpu", case, marks=on_cpu) for case in SMALL] + [
    pytest.param("cuda", case, marks=[pytest.mark.gpu, needs_cuda]) for case in (SMALL[0], *LARGE)
]
REDUCTIONS = [(group, window) for group in ("max", "mean") for window in ("max", "mean")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(triton_kernels, "_MIN_PART", 64)
        monkeypatch.setattr(triton_kernels, "_ONE_TILE", 64)
        monkeypatch.setattr(triton_kernels, "_PLAN_TILE", 32)
        monkeypatch.setattr(triton_kernels, "_MOVE_TILE", 16)


def rounding(device: str | torch.device) -> float:
    """Relative error of a weight: tensor cores round sums of bf16 products more coarsely."""
    return 1e-5 if torch.device(device).type == "cpu" else 2e-4


def assert_close(got: torch.Tensor, expected: torch.Tensor, rtol: float | None = None) -> None:
    rtol = rtol or rounding(got.device)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-9, equal_nan=True)


def reference_attention(
    cache: KVCache, job: CompressionJob, scale: float, group: str, window: str
) -> torch.Tensor:
    """On the cache's device: large cases take long on the CPU."""
    keys = keys_of(cache, job.source_blocks, job.length)
    queries = cache.queries[:, job.query_slot]
    return scores.window_attention(queries, keys, scale, group, window)


def reference_redundancy(
    cache: KVCache, job: CompressionJob, positions: torch.Tensor, local: bool, *numbers: float
) -> torch.Tensor:
    keys = keys_of(cache, job.source_blocks, job.length)
    positions = positions.to(keys.device)
    return scores.redundancy(keys, positions, cache.spec.block_size, local, *numbers)


@pytest.mark.parametrize(("device", "case"), CASES)
def test_attention(device: str, case: Case) -> None:
    cache, job = case.make()
    cache = moved(cache, device)
    kernels = TritonKernels(cache)
    some = random.Random(case.dim).sample(REDUCTIONS, 2)
    for group, window in REDUCTIONS if case == LARGE[0] else some:
        got = kernels.attention(job, 0.2, group, window)
        assert_close(got, reference_attention(cache, job, 0.2, group, window))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("group", "window"), REDUCTIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize(
    "what", ["nan query", "nan key", "late nan key", "inf key", "large", "nan fp8 key"]
)
def test_attention_of_abnormal_numbers(device: str, group: str, window: str, what: str) -> None:
    """NaN reaches what it reaches in the reference, and nothing else."""
    cache, job = Case(bf16, 16, 3, 16, 3, 70, 3).make()
    if what == "nan fp8 key":
        cache = quantised(cache)
        cache.kv_bits[0, job.source_blocks[2], 0, 0, 8, 3] = 0xFF
    elif what == "large":
        cache.kv.mul_(30)
        cache.queries.mul_(30)
    elif what == "nan query":
        cache.queries[0, job.query_slot, 1, 4] = torch.nan  # head 1 of KV head 1
    else:
        slot = job.length - 1 if what == "late nan key" else 40
        block = job.source_blocks[slot // 16]
        cache.kv[0, block, 0, 0, slot % 16, 3] = torch.inf if what == "inf key" else torch.nan
    cache = moved(cache, device)
    got = TritonKernels(cache).attention(job, 0.2, group, window)
    expected = reference_attention(cache, job, 0.2, group, window)
    assert expected.isnan().any() == (what != "large")
    # Logits of thousands: the error of a weight is that of their last bits.
    assert_close(got, expected, rtol=1e-2 if what == "large" else None)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("device", "case"), CASES)
def test_redundancy(device: str, case: Case, local: bool) -> None:
    cache, job = case.make()
    positions = positions_before(cache, job)
    cache = moved(cache, device)
    got = TritonKernels(cache).redundancy(job, local, 0.1, 0.5)
    expected = reference_redundancy(cache, job, positions, local, 0.1, 0.5)
    plain = reference_redundancy(cache, job, positions, local, 0.1, 2.0)
    assert not torch.allclose(plain, expected, rtol=1e-4), "no near-duplicate to spare"
    # Similarities within rounding of the threshold may fall on either side of it.
    differs = ~torch.isclose(got, expected, rtol=rounding(device), atol=1e-9)
    assert differs.float().mean() < 0.01
    torch.testing.assert_close(got, expected, rtol=0.2, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("what", ["zero", "equal", "nan", "copies"])
def test_redundancy_of_abnormal_keys(device: str, local: bool, what: str) -> None:
    cache, job = Case(fp32, 16, 1, 16, 4, 70, 3, num_scored=48).make()
    if what == "zero":
        cache.kv.zero_()
    elif what == "equal":
        cache.kv.fill_(0.7)
    elif what == "copies":
        cache.kv[:, :, 0, :, 8:] = cache.kv[:, :, 0, :, :8]
    else:
        cache.kv[0, job.source_blocks[1], 0, 0, 3, 3] = torch.nan
    positions = positions_before(cache, job)
    cache = moved(cache, device)
    got = TritonKernels(cache).redundancy(job, local, 0.4, 0.5)
    expected = reference_redundancy(cache, job, positions, local, 0.4, 0.5)
    assert expected.isnan().any() == (what == "nan")
    assert_close(got, expected)


@pytest.mark.parametrize(("device", "case"), CASES)
def test_value_norms(device: str, case: Case) -> None:
    cache, job = case.make()
    cache = moved(cache, device)
    values = values_of(cache, job.source_blocks, job.length).float()
    got = TritonKernels(cache).value_norms(job)
    assert_close(got, torch.linalg.vector_norm(values, dim=-1))


def random_scores(case: Case, seed: int) -> torch.Tensor:
    """All different, ties between zeros of both signs, or infinities, NaN, zeros, denormals."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.layers, case.kv_heads, case.length)
    if seed % 3 == 0:
        return torch.randn(shape, generator=generator)
    if seed % 3 == 1:
        return torch.tensor([-0.0, 0.0, 1.0])[torch.randint(3, shape, generator=generator)]
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-42, -1e-42, 1.0])
    odd = torch.cat((odd, nan))
    return odd[torch.randint(len(odd), shape, generator=generator)]


# Each case has two of the kinds of scores, one for each plan.
SELECTIONS = [
    pytest.param(*case.values, (index + 3 * stable) % 6, bool(stable), marks=case.marks)
    for index, case in enumerate(CASES)
    for stable in (0, 1)
]


@pytest.mark.parametrize(("device", "case", "seed", "stable"), SELECTIONS)
def test_select_and_compact(device: str, case: Case, seed: int, stable: bool) -> None:
    """The whole pool is bit-identical to the reference's, layout included."""
    cache, job = case.make(seed)
    final = random_scores(case, seed)
    stored = torch.rand(final.shape) if seed % 4 else None
    protect_below = 20 if seed % 2 else 0
    got = moved(cache, device)
    positions = positions_before(cache, job).to(device)
    cache, final = moved(cache, device), final.to(device)
    stored = None if stored is None else stored.to(device)
    kept = select_tokens(final, positions, job.keep, case.window, protect_below)
    slots = plan_stable(kept, job.keep) if stable else plan_holes(kept, job.keep)
    move_tokens(cache, job.source_blocks, job.target_blocks, slots, positions, stored)
    TritonKernels(got).select_and_compact(job, final, stored, case.window, protect_below, stable)
    assert torch.equal(got.positions, cache.positions)
    assert torch.equal(got.scores, cache.scores)
    assert torch.equal(got.kv_bits, cache.kv_bits)


@pytest.mark.parametrize("device", DEVICES)
def test_jobs_do_not_share_block_tables(device: str) -> None:
    """Two jobs in turn: the block table that is kept for a job is that job's."""
    cache, job = Case(fp32, 16, 1, 16, 4, 40, 2).make()
    _, other = Case(fp32, 16, 1, 16, 4, 40, 2).make(seed=1)
    assert job.source_blocks != other.source_blocks
    kernels = TritonKernels(moved(cache, device))
    norms = [kernels.value_norms(each) for each in (job, other, job)]
    assert torch.equal(norms[0], norms[2])
    assert not torch.equal(norms[0], norms[1])


COMPRESSED = [pytest.param("cpu", case, marks=on_cpu) for case in (SMALL[0], SMALL[6])] + [
    pytest.param("cuda", case, marks=[pytest.mark.gpu, needs_cuda])
    for case in (SMALL[0], LARGE[0], LARGE[5])
]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize(("device", "case"), COMPRESSED)
def test_compressor_keeps_what_torch_keeps(device: str, case: Case, policy: str) -> None:
    """Equal sets, but for tokens whose scores equal that of the last one kept, within rounding."""
    close = rounding(device)
    cache, job = case.make()
    positions = positions_before(cache, job).flatten(0, 1)
    cache = moved(cache, device)
    options = CompressionOptions(
        window=case.window,
        compaction="stable" if policy in ("rkv", "random") else "holes",
        num_sinks=2,
    )
    made = make_policy(policy, {})
    scale = case.dim**-0.5
    view = CacheView(cache, job, scale, case.window, 0)
    final = made.scores(view).final.flatten(0, 1).cpu()
    final[:, -case.window :] = torch.inf
    final = final.masked_fill(positions < 2, torch.inf)
    fast = clone(cache)
    reference = clone(cache)
    Compressor(reference, made, options, scale, "torch").run(job)
    Compressor(fast, made, options, scale, "triton").run(job)
    reference, fast = moved(reference, "cpu"), moved(fast, "cpu")
    pairs = zip(tokens_after(reference, job), tokens_after(fast, job), strict=True)
    for worth, order, (one, other) in zip(final, positions.tolist(), pairs, strict=True):
        last = worth.sort(descending=True).values[job.keep - 1].item()
        of_position = dict(zip(order, worth.tolist(), strict=True))
        for position in one.keys() ^ other.keys():
            assert of_position[position] == pytest.approx(last, rel=close, abs=1e-9)
        for position in one.keys() & other.keys():
            assert one[position][:2] == other[position][:2]
            assert one[position][2] == pytest.approx(other[position][2], rel=close, abs=1e-9)


class CountedKernel:
    """Stands in for a kernel and counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 3])
def test_launches_of_a_job(device: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kernel under the default policy, whatever the number of layers."""
    counted = []
    for module, names in (
        (window_attention, ("window_statistics", "window_scores")),
        (redundancy, ("similarity_columns", "spared_means", "value_norms")),
        (compaction, ("select_and_plan", "move_survivors")),
    ):
        for name in names:
            counted.append(CountedKernel(getattr(module, name)))
            monkeypatch.setattr(module, name, counted[-1])
    cache, job = Case(fp32, 16, 1, 16, 4, 40, 2, layers=layers, kv_heads=1).make()
    options = CompressionOptions(window=4)
    policy = make_policy("zipage", {})
    Compressor(moved(cache, device), policy, options, 0.25, "triton").run(job)
    assert [kernel.launches for kernel in counted] == [1] * 7


@pytest.mark.parametrize("device", DEVICES)
def test_warm_up_runs_every_kernel(device: str) -> None:
    """On a pool in use its other blocks are left alone."""
    cache, _ = Case(fp32, 16, 1, 16, 4, 40, 2).make()
    options = CompressionOptions(window=4, protect_prompt=0.5)
    on_device = moved(cache, device)
    compressor = Compressor(on_device, make_policy("zipage", {}), options, 0.25, "triton")
    compressor.warm_up(1)
    assert torch.equal(on_device.kv.cpu(), cache.kv)
    compressor.warm_up(3)
    after = on_device.kv.cpu()
    assert not torch.equal(after[:, :2], cache.kv[:, :2])
    assert torch.equal(after[:, 2:], cache.kv[:, 2:])


def test_pools_that_do_not_fit_are_refused() -> None:
    double = make_cache(dtype=torch.float64)
    wide = make_cache(blocks=2, dim=272)
    for cache in (double, wide):
        with pytest.raises(ConfigError, match="head_dim"):
            make_kernels(cache, "triton")
        assert not isinstance(make_kernels(cache), TritonKernels)
    with pytest.raises(ConfigError, match="auto, torch, native, triton"):
        make_kernels(wide, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_fit_the_shared_memory(
    dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are cut (24 queries of 8 heads) are in flight up to 3.5 times, as compiled."""
    cache = make_cache(blocks=2, block_size=64, group=group, dim=dim, window=24, dtype=torch.half)
    stages = []
    for memory in (101376, 166912, 232448):  # of compute capability 8.9, 8.0 and 9.0
        monkeypatch.setattr(triton_kernels, "shared_memory", lambda device, size=memory: size)
        kernels = TritonKernels(cache)
        cut = kernels._attention["ROW_CHUNKS"] > 1
        assert cut == (group == 8)
        stages.append(kernels._score_stages)
        fits = not cut or 3.5 * kernels._attention["ROWS"] * dim * 2 <= memory
        assert stages[-1] == (3 if fits else 1)
    assert stages[2] == 3 and stages[0] == (1 if group == 8 and dim > 64 else 3)


def compiled(*shape: object) -> list[dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_compression", *map(str, shape)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "shape",
    [
        ("bfloat16", 128, 4, 24, 256),
        ("bfloat16", 128, 4, 24, 256, "fp8"),
        *(
            pytest.param(shape, marks=pytest.mark.slow)
            for shape in (
                ("bfloat16", 64, 8, 16, 128),
                ("bfloat16", 80, 7, 24, 48),
                ("bfloat16", 256, 1, 24, 16),
                ("float16", 96, 2, 16, 64),
                ("float32", 128, 4, 24, 256),
                ("float32", 64, 1, 16, 64),
                ("bfloat16", 80, 7, 24, 48, "fp8"),
                ("float32", 128, 4, 24, 256, "fp8"),
            )
        ),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_kernels_compile_for_hopper(shape: tuple[object, ...]) -> None:
    """Within the shared memory of a multiprocessor, without spilled registers in 16 bits."""
    kernels = compiled(*shape)
    assert {kernel["kernel"] for kernel in kernels} == {
        "window_statistics",
        "window_scores",
        "similarity_columns",
        "spared_means",
        "value_norms",
        "select_and_plan",
        "move_survivors",
    }
    for kernel in kernels:
        assert kernel["shared_memory"] <= 227 << 10, kernel
        if shape[0] != "float32":
            assert kernel["stack"] == 0, kernel
            products = kernel["kernel"] in (
                "window_statistics", "window_scores", "similarity_columns",
            )  # fmt: skip
            assert kernel["tensor_cores"] == products, kernel
