"""Whole engine steps on a CUDA device against what the device can do.

Decode: steps of equal requests at one length, against the time of reading the weights and all live
keys and values once at the bandwidth of a copy; and how long no kernel runs between them, from a
profile. Prefill: one step of a long chunk, its useful operations against the rate of a square
matrix product. Both ceilings are measured in the same run.

    python benchmarks/steps_gpu.py [--shape qwen3-8b] [--requests 96] [--tokens 2112] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from device_rates import matmul_rate
from torch.profiler import ProfilerActivity, profile

from zipage import LLM, SamplingParams
from zipage.bench.roofline import measure_copy_bandwidth, weight_bytes_per_step

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 24, 40, 12
CHUNK = 8192


def make_llm(shape: str, **options: Any) -> LLM:
    """An engine of random weights."""
    return LLM(
        load_format="dummy",
        model_shape=shape,
        dtype="bfloat16",
        device="cuda",
        max_model_len=17000,
        enable_prefix_caching=False,
        **options,
    )


def random_prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def timed_steps(llm: LLM, count: int) -> list[float]:
    """Milliseconds from step to step; the engine runs one step ahead of the host."""
    times = []
    torch.cuda.synchronize()
    last = time.perf_counter()
    for _ in range(count):
        llm.engine.step()
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    torch.cuda.synchronize()
    return times


def busy_share(events: list[tuple[float, float]]) -> tuple[float, float]:
    """Time in which at least one kernel or copy ran, and the time from first to last."""
    busy, reached = 0.0, events[0][0]
    for start, end in sorted(events):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - events[0][0]


def measure_decode(args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    count, tokens = args.requests, args.tokens
    llm = make_llm(
        args.shape,
        kv_budget=None,
        compression="full",
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        max_num_seqs=count,
        max_num_batched_tokens=8192,
        **args.options,
    )
    runner = llm.engine.core.runner
    steps = WARM_STEPS + TIMED_STEPS + PROFILED_STEPS
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=4 * steps + 200
    )
    for i in range(count):
        prompt = random_prompt(tokens - steps, i, llm.engine.vocab_size)
        llm.engine.add_request(prompt, params)
    while llm.engine.core.stats().generated_tokens < count:
        llm.engine.step()
    timed_steps(llm, WARM_STEPS)
    times = timed_steps(llm, TIMED_STEPS)
    lengths = [r.length for r in llm.engine.core.scheduler.running]
    assert len(lengths) == count
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        timed_steps(llm, PROFILED_STEPS)
    events = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy, span = busy_share(sorted(events))
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=20))
    # Lengths at the middle of the timed steps.
    live = sum(lengths) - count * TIMED_STEPS // 2
    floor = weight_bytes_per_step(runner.model) + live * runner.cache.spec.bytes_per_token
    result = {
        "requests": count,
        "tokens": live / count,
        "ms": statistics.median(times),
        "floor_ms": 1e3 * floor / bandwidth,
        "idle_share": 1 - busy / span,
    }
    result["times_floor"] = result["ms"] / result["floor_ms"]
    llm.shutdown()
    return result


def measure_prefill(args: argparse.Namespace) -> dict[str, Any]:
    llm = make_llm(
        args.shape,
        kv_budget=None,
        compression="full",
        block_size=args.block_size,
        kv_cache_memory="8GiB",
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        **args.options,
    )
    model = llm.engine.core.runner.model
    rate = matmul_rate(model.dtype)
    config = model.config
    layers = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size * (
        1 if config.tie_word_embeddings else 2
    )
    pairs = CHUNK * (CHUNK + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    operations = 2 * layers * CHUNK + attention
    times = []
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=1)
    for i in range(7):
        prompt = random_prompt(CHUNK, i, llm.engine.vocab_size)
        torch.cuda.synchronize()
        started = time.perf_counter()
        llm.engine.add_request(prompt, params)
        while llm.engine.has_unfinished:
            llm.engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[2:])
    llm.shutdown()
    return {
        "chunk": CHUNK,
        "ms": 1e3 * seconds,
        "tflops": operations / seconds / 1e12,
        "matmul_tflops": rate / 1e12,
        "share": operations / seconds / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=2112)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--kv-cache-memory", default="36GiB")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    results: dict[str, Any] = {"copy_bandwidth": bandwidth, "options": args.options}
    results["decode"] = measure_decode(args, bandwidth)
    print(json.dumps(results["decode"], indent=1))
    if not args.skip_prefill:
        results["prefill"] = measure_prefill(args)
        print(json.dumps(results["prefill"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
