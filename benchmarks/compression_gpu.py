"""Time of one compression on a CUDA device, split by kernel, against what the device can do.

    python benchmarks/compression_gpu.py [--kv-cache-dtype fp8] [--out FILE] [--reference]

The shape is Qwen3-8B's (36 layers, 32 query and 8 KV heads of 128, bf16). Jobs of several
requests take turns, so that the L2 cache holds nothing of the next one. A kernel's share of the
copy bandwidth, measured in the same run, counts each byte it must read or write once, however
often it does. `host` is the time the launching thread spends on a job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from zipage.bench.roofline import measure_copy_bandwidth
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import KV_DTYPES, quantise
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.job import CompressionJob
from zipage.compression.kernels import KernelChoice
from zipage.compression.policies import default_window, make_policy
from zipage.kernels.triton import compaction, redundancy, window_attention

LAYERS, KV_HEADS, HEADS, DIM = 36, 8, 32, 128
DEVICE = torch.device("cuda")
REQUESTS = 6
KERNELS = (
    (window_attention, "window_statistics"),
    (window_attention, "window_scores"),
    (redundancy, "value_norms"),
    (redundancy, "similarity_columns"),
    (redundancy, "spared_means"),
    (compaction, "select_and_plan"),
    (compaction, "move_survivors"),
)
# Keeps the device busy while a job is enqueued, so that events time kernels and not launches.
SLEEP_CYCLES = 20_000_000

Spans = dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]


class TimedKernel:
    """Stands in for a Triton kernel and records events around its launches."""

    def __init__(self, kernel: Any, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._kernel = kernel
        self._spans = spans

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._kernel[grid](*args, **kwargs)
            end.record()
            self._spans.append((start, end))

        return launch


def make_cache(blocks: int, block_size: int, window: int, kv_dtype: torch.dtype | None) -> KVCache:
    cache = KVCache(
        KVCacheSpec(
            num_layers=LAYERS,
            num_blocks=REQUESTS * blocks,
            block_size=block_size,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=torch.bfloat16,
            device=DEVICE,
            window=window,
            num_query_slots=REQUESTS,
            kv_dtype=kv_dtype,
        )
    )
    if kv_dtype is None:
        cache.kv.normal_()
    else:
        cache.kv_scales.fill_(2.0**-7)
        normal = torch.empty(cache.kv.shape[1:], dtype=torch.bfloat16, device=DEVICE)
        for bits, scales in zip(cache.kv_bits, cache.kv_scales, strict=True):
            bits.copy_(quantise(normal.normal_(), scales[:, :, None, None]))
    cache.queries.normal_()
    cache.scores.uniform_()
    # Blocks of the requests alternate; each request's are a text in order.
    slots = torch.arange(blocks * block_size, dtype=torch.int32, device=DEVICE)
    text = slots.view(blocks, 1, block_size).repeat_interleave(REQUESTS, 0)
    cache.positions.copy_(text.expand(LAYERS, -1, KV_HEADS, -1))
    return cache


def make_jobs(blocks: int, block_size: int) -> list[CompressionJob]:
    keep = (blocks - 1) * block_size
    jobs = []
    for request in range(REQUESTS):
        source = tuple(range(request, REQUESTS * blocks, REQUESTS))
        jobs.append(
            CompressionJob(
                request_id=str(request),
                source_blocks=source,
                target_blocks=source[:-1],
                length=keep + block_size,
                keep=keep,
                query_slot=request,
                num_scored=keep,
                num_tokens=keep + 2 * block_size,
                prompt_len=200,
                compression_index=1,
            )
        )
    return jobs


def least_bytes(job: CompressionJob, stable: bool, itemsize: int) -> dict[str, int]:
    """Bytes each kernel has to read and write at least."""
    pairs = LAYERS * KV_HEADS
    rows = pairs * job.length * DIM * itemsize
    per_token = pairs * job.length * 4
    moved = job.keep if stable else job.length - job.keep
    return {
        "window_statistics": rows,
        "window_scores": rows + per_token,
        "value_norms": rows + per_token,
        "similarity_columns": rows + 4 * per_token,
        "spared_means": 5 * per_token,
        "select_and_plan": 4 * per_token,
        # Each moved key and value is read and written.
        "move_survivors": pairs * moved * (2 * 2 * DIM * itemsize + 16),
    }


def measure(compressor: Compressor, jobs: list[CompressionJob], rounds: int) -> tuple[float, float]:
    """Median seconds of a job, of the device and of the host."""
    device, host = [], []
    for _ in range(rounds):
        for job in jobs:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            started = time.perf_counter()
            compressor.run(job)
            host.append(time.perf_counter() - started)
            end.record()
            torch.cuda.synchronize()
            device.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(device[len(jobs) :]), statistics.median(host[len(jobs) :])


def measure_kernels(compressor: Compressor, jobs: list[CompressionJob]) -> dict[str, float]:
    """Median seconds of each kernel."""
    spans: Spans = defaultdict(list)
    for module, name in KERNELS:
        setattr(module, name, TimedKernel(getattr(module, name), spans[name]))
    try:
        measure(compressor, jobs, 3)
    finally:
        for module, name in KERNELS:
            setattr(module, name, getattr(module, name)._kernel)
    return {
        name: statistics.median(start.elapsed_time(end) * 1e-3 for start, end in found)
        for name, found in spans.items()
        if found
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reference", action="store_true", help="time the torch path as well")
    parser.add_argument("--kv-cache-dtype", choices=list(KV_DTYPES), default="auto")
    args = parser.parse_args()
    kv_dtype = KV_DTYPES[args.kv_cache_dtype]

    bandwidth = measure_copy_bandwidth(DEVICE)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth": bandwidth,
        "kv_cache_dtype": args.kv_cache_dtype,
        "cases": [],
    }
    cases: list[tuple[str, dict[str, object], str]] = [
        ("zipage", {}, "holes"),
        ("zipage", {}, "stable"),
        ("zipage", {"redundancy": "raw"}, "holes"),
        ("zipage-paper", {}, "holes"),
        ("zipage-paper", {"redundancy": "raw"}, "holes"),
    ]
    for budget, block_size in ((2048, 256), (1024, 128)):
        blocks = budget // block_size + 1
        jobs = make_jobs(blocks, block_size)
        for name, options, compaction_plan in cases:
            window = default_window(name)
            cache = make_cache(blocks, block_size, window, kv_dtype)
            common = CompressionOptions(window=window, compaction=compaction_plan)
            policy = make_policy(name, options)

            def compressor(
                kernels: KernelChoice,
                cache: KVCache = cache,
                policy: Any = policy,
                common: CompressionOptions = common,
            ) -> Compressor:
                return Compressor(cache, policy, common, DIM**-0.5, kernels)

            fused = compressor("triton")
            device_seconds, host_seconds = measure(fused, jobs, args.rounds)
            kernels = measure_kernels(fused, jobs)
            floor = least_bytes(jobs[0], compaction_plan == "stable", cache.kv.dtype.itemsize)
            reference = None
            if args.reference:
                reference = measure(compressor("torch"), jobs[:1], 3)[0]
            label = f"{name} {options.get('redundancy', 'lightning')} {compaction_plan}"
            print(
                f"\nbudget {budget}, block {block_size}, window {window}, {label}: "
                f"device {1e6 * device_seconds:.0f} us, host {1e6 * host_seconds:.0f} us"
                + (f", torch path {1e6 * reference:.0f} us" if reference else "")
            )
            for kernel, seconds in kernels.items():
                share = floor[kernel] / seconds / bandwidth
                print(
                    f"  {kernel:20} {1e6 * seconds:8.1f} us {floor[kernel] / 1e6:8.1f} MB "
                    f"{floor[kernel] / seconds / 1e12:6.2f} TB/s {share:6.1%}"
                )
            rest = device_seconds - sum(kernels.values())
            print(f"  {'torch and gaps':20} {1e6 * rest:8.1f} us")
            report["cases"].append(
                {
                    "policy": name,
                    "redundancy": options.get("redundancy", "lightning"),
                    "compaction": compaction_plan,
                    "budget": budget,
                    "block_size": block_size,
                    "window": window,
                    "device_seconds": device_seconds,
                    "host_seconds": host_seconds,
                    "torch_seconds": reference,
                    "kernels": {
                        kernel: {"seconds": seconds, "least_bytes": floor[kernel]}
                        for kernel, seconds in kernels.items()
                    },
                }
            )
            del cache, fused, compressor
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
