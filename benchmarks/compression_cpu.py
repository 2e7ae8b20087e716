"""Time of one compression on CPU, by policy, native and torch.

    python benchmarks/compression_cpu.py [--threads 2] [--length 576] [--requests 16]

The shape is zipage-tiny's. The jobs of several requests take turns, so that a cache is as cold as
it is in a running engine. `key read` is the time one read of the scored keys takes at the copy
bandwidth measured in the same run, as a share of the run's time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.job import CompressionJob
from zipage.compression.policies import make_policy, policy_names

LAYERS, KV_HEADS, HEADS, DIM, BLOCK, WINDOW = 8, 2, 8, 64, 64, 16


def make_cache(requests: int, blocks: int) -> KVCache:
    cache = KVCache(
        KVCacheSpec(
            num_layers=LAYERS,
            num_blocks=requests * blocks,
            block_size=BLOCK,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
            window=WINDOW,
            num_query_slots=requests,
        )
    )
    generator = torch.Generator().manual_seed(0)
    cache.kv.normal_(generator=generator)
    cache.queries.normal_(generator=generator)
    # Scored slots: a text in order, as after a stable compaction that evicted nothing.
    for request in range(requests):
        text = torch.arange(blocks * BLOCK, dtype=torch.int32).view(blocks, 1, BLOCK)
        cache.positions[:, request * blocks : (request + 1) * blocks] = text
    return cache


def make_jobs(requests: int, length: int, scored: bool) -> list[CompressionJob]:
    blocks = -(-length // BLOCK)
    keep = (length - 1) // BLOCK * BLOCK
    jobs = []
    for request in range(requests):
        source = tuple(range(request * blocks, (request + 1) * blocks))
        jobs.append(
            CompressionJob(
                request_id=str(request),
                source_blocks=source,
                target_blocks=source[: keep // BLOCK],
                length=length,
                keep=keep,
                query_slot=request,
                num_scored=keep if scored else 0,
                num_tokens=length + (BLOCK if scored else 0),
                prompt_len=300,
                compression_index=int(scored),
            )
        )
    return jobs


def copy_bandwidth() -> float:
    """Bytes read per second by a copy of 256 MB, which reads and writes."""
    source = torch.ones(1 << 26)
    target = torch.zeros_like(source)
    best = min(_timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / best


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def median_ms(compressor: Compressor, jobs: list[CompressionJob], rounds: int) -> float:
    compressor.run(jobs[0])
    times = [_timed(lambda j=job: compressor.run(j)) for _ in range(rounds) for job in jobs]
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--length", type=int, default=576, help="cached tokens before")
    parser.add_argument("--requests", type=int, default=16, help="requests that take turns")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    cache = make_cache(args.requests, -(-args.length // BLOCK))
    bandwidth = copy_bandwidth()
    key_bytes = LAYERS * KV_HEADS * args.length * DIM * 4
    key_ms = 1e3 * key_bytes / bandwidth
    print(
        f"{args.threads} threads, T={args.length}, copy {bandwidth / 1e9:.1f} GB/s, "
        f"keys {key_bytes / 1e6:.1f} MB = {key_ms:.3f} ms"
    )
    print(f"{'policy':28} {'compaction':10} {'native ms':>9} {'key read':>8} {'torch ms':>9}")
    later = make_jobs(args.requests, args.length, scored=True)
    cases: list[tuple[str, dict[str, object]]] = [(name, {}) for name in policy_names()]
    cases.insert(1, ("zipage", {"lam": 0.8}))
    for name, options in cases:
        for compaction in ("holes", "stable"):
            common = CompressionOptions(window=WINDOW, compaction=compaction)
            policy = make_policy(name, options)
            native, reference = (
                Compressor(cache, policy, common, DIM**-0.5, kernels=kernels)
                for kernels in ("native", "torch")
            )
            native_ms = median_ms(native, later, args.rounds)
            torch_ms = median_ms(reference, later[:4], 1)
            label = name + "".join(f" {key}={value}" for key, value in options.items())
            print(
                f"{label:28} {compaction:10} {native_ms:9.3f} {key_ms / native_ms:8.0%} "
                f"{torch_ms:9.2f}"
            )


if __name__ == "__main__":
    main()
