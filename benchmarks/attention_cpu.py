"""Decode attention on CPU against the memory bandwidth measured in the same run.

    python benchmarks/attention_cpu.py [--threads 2] [--sequences 32] [--length 450]

One decode step of every layer over sequences of equal length whose blocks are scattered over the
pool, zipage-tiny's shape by default. `read` sums a tensor as large as the KV a step reads, `copy`
copies it (counting both directions). All are timed in turns, so that a busy machine slows each of
them alike. A step's roofline is the time of reading its KV once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, make_backend
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.evals.machine import describe_machine


def make_cache(args: argparse.Namespace) -> KVCache:
    cache = KVCache(
        KVCacheSpec(
            num_layers=args.layers,
            num_blocks=args.sequences * -(-args.length // args.block_size),
            block_size=args.block_size,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def make_step(args: argparse.Namespace, tables: torch.Tensor, fresh: int) -> StepInputs:
    """The last `fresh` tokens of every sequence in `tables`."""
    sequences, b = len(tables), args.block_size
    slots = torch.arange(args.length - fresh, args.length)
    mapping = tables[:, slots // b].long() * b + slots % b
    rows = sequences * fresh
    return StepInputs(
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=slots.repeat(sequences),
        slot_mapping=mapping.flatten(),
        capture=torch.full((rows,), -1),
        query_start=torch.arange(0, rows + 1, fresh, dtype=torch.int32),
        cache_lens=torch.full((sequences,), args.length, dtype=torch.int32),
        block_tables=tables,
        num_tokens=rows,
        max_query_len=fresh,
        max_cache_len=args.length,
        any_capture=False,
    )


def time_in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times over all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=450)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    cache = make_cache(args)
    blocks = torch.randperm(cache.spec.num_blocks, generator=torch.Generator().manual_seed(1))
    tables = blocks.int().view(args.sequences, -1)
    angles = torch.rand(args.length, args.dim // 2)
    norm = torch.ones(args.dim)
    transforms = [
        QKVTransform(norm, norm, 1e-6, angles.cos(), angles.sin()) for _ in range(args.layers)
    ]
    width = (args.heads + 2 * args.kv_heads) * args.dim
    backends = [make_backend(name, cache, args.dim**-0.5) for name in ("native", "torch")]

    def run(backend: AttentionBackend, qkv: torch.Tensor, step: StepInputs) -> None:
        for layer, transform in enumerate(transforms):
            backend.attend(layer, qkv, transform, step)

    kv_bytes = args.sequences * args.length * cache.spec.bytes_per_token
    decode = make_step(args, tables, 1)
    prefill = make_step(args, tables[:1].contiguous(), args.length)
    decode_qkv = torch.randn(args.sequences, width)
    prefill_qkv = torch.randn(args.length, width)
    # Ones, not zeros: untouched pages of zeros are all the same page and would stay in cache.
    memory, target = torch.ones(kv_bytes // 4), torch.ones(kv_bytes // 4)
    calls: dict[str, Callable[[], object]] = {
        "read": memory.sum,
        "copy": lambda: target.copy_(memory),
    }
    for backend in backends:
        calls[f"decode {backend.name}"] = lambda b=backend: run(b, decode_qkv, decode)
        calls[f"prefill {backend.name}"] = lambda b=backend: run(b, prefill_qkv, prefill)
    seconds = time_in_turns(calls, args.repeats)

    print(describe_machine())
    print(
        f"{args.threads} threads, {args.sequences} sequences x {args.length} tokens, "
        f"{args.layers} layers, {args.heads}/{args.kv_heads} heads x {args.dim}, "
        f"blocks of {args.block_size}: {kv_bytes / 1e6:.0f} MB of KV per decode step"
    )
    roofline = statistics.median(seconds["read"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        line = f"{name:15} median {middle * 1e3:8.2f} ms  best {min(values) * 1e3:8.2f} ms"
        if name.startswith("prefill"):
            pairs = args.length * (args.length + 1) / 2 * args.heads * args.layers
            line += f"  {4 * pairs * args.dim / middle / 1e9:6.1f} GFLOP/s, one prompt"
        else:
            moved = kv_bytes * (2 if name == "copy" else 1)
            line += f"  {moved / middle / 1e9:6.1f} GB/s"
        if name.startswith("decode"):
            line += f"  {roofline / middle:4.0%} of read"
        print(line)


if __name__ == "__main__":
    main()
