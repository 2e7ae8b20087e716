"""Speed of the attention kernels on a CUDA device against what the device can do.

Decode attention is bound by memory: its bytes (each cached key and value once) over the time of
a replayed graph, as a share of the bandwidth of a copy measured in the same run. Prefill is bound
by arithmetic: its useful operations, and the rate of a square matrix product measured in the same
run.

    python benchmarks/attention_gpu.py [--kv-cache-dtype fp8] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from device_rates import DEVICE, copy_bandwidth, matmul_rate, timed

from zipage.attention.backend import QKVTransform, StepInputs
from zipage.attention.triton_backend import TritonBackend
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import KV_DTYPES
from zipage.models.rope import RopeParameters, build_rope_tables

HEADS, KV_HEADS, DIM = 32, 8, 128


def fill_with_tokens(cache: KVCache) -> None:
    """Normal keys and values; in fp8 bytes that are numbers, spread over the whole range."""
    if cache.spec.is_quantised:
        cache.kv_scales.fill_(2.0**-7)
        for layer in cache.kv_bits:
            layer.random_(0, 0x7F)
    else:
        cache.kv.normal_()


class Scene:
    """Sequences in a pool of several layers; layers are cycled so that L2 holds nothing."""

    def __init__(
        self,
        lens: list[int],
        fresh: list[int],
        block_size: int,
        layers: int,
        kv_dtype: torch.dtype | None,
    ) -> None:
        self.lens, self.fresh, self.layers = lens, fresh, layers
        blocks = [-(-n // block_size) for n in lens]
        ids = list(range(sum(blocks)))
        random.Random(0).shuffle(ids)
        spec = KVCacheSpec(
            layers,
            len(ids),
            block_size,
            HEADS,
            KV_HEADS,
            DIM,
            torch.bfloat16,
            DEVICE,
            kv_dtype=kv_dtype,
        )
        self.cache = KVCache(spec)
        fill_with_tokens(self.cache)
        self.backend = TritonBackend(self.cache, DIM**-0.5, len(lens))
        table = np.zeros((len(lens), max(blocks)), dtype=np.int32)
        for row, count in enumerate(blocks):
            table[row, :count] = [ids.pop() for _ in range(count)]
        total = sum(fresh)
        positions = np.concatenate([np.arange(n - q, n) for n, q in zip(lens, fresh, strict=True)])
        seq = np.repeat(np.arange(len(lens)), fresh)
        slots = table[seq, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        starts = np.concatenate(([0], np.cumsum(fresh))).astype(np.int32)

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(DEVICE)

        self.step = StepInputs(
            input_ids=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            positions=put(positions.astype(np.int64)),
            slot_mapping=put(slots),
            capture=torch.full((total,), -1, device=DEVICE),
            query_start=put(starts),
            cache_lens=put(np.array(lens, dtype=np.int32)),
            block_tables=put(table),
            num_tokens=total,
            max_query_len=max(fresh),
            max_cache_len=max(lens),
            any_capture=False,
            query_start_host=starts,
            cache_lens_host=np.array(lens, dtype=np.int32),
        )
        cos, sin = build_rope_tables(RopeParameters(), DIM, max(lens), DEVICE)
        norm = torch.ones(DIM, device=DEVICE, dtype=torch.bfloat16)
        self.transform = QKVTransform(norm, norm, 1e-6, cos, sin)
        self.qkv = torch.randn(
            total, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE, dtype=torch.bfloat16
        )
        self.backend.attend(0, self.qkv, self.transform, self.step)

    def seconds(self) -> tuple[float, float]:
        """Median seconds a layer of the whole of `attend`, and of its attention kernels alone."""
        plan = self.backend._plan
        assert plan is not None
        out = torch.empty(len(self.qkv), HEADS * DIM, device=DEVICE, dtype=torch.bfloat16)
        tables, lens = self.step.block_tables, self.step.cache_lens

        def whole() -> None:
            for layer in range(self.layers):
                self.backend.attend(layer, self.qkv, self.transform, self.step)

        def attention() -> None:
            for layer in range(self.layers):
                if plan.prefills is not None:
                    self.backend.prefill.run(layer, self.qkv, tables, lens, plan.prefills, out)
                if plan.decodes is not None:
                    self.backend.decode.run(layer, self.qkv, tables, plan.decodes, out)

        return timed(whole) / self.layers, timed(attention) / self.layers


def decode_rows(bandwidth: float, kv_dtype: torch.dtype | None) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    cases = [
        (batch, length, block)
        for batch in (16, 64, 96, 256)
        for length in (512, 2112, 8192, 16384)
        for block in (256,)
        if batch * length <= 1 << 21
    ]
    cases += [(96, 2112, block) for block in (16, 48, 64, 128)]
    draw = random.Random(0)
    mixed = [min(16384, max(512, int(draw.lognormvariate(8.77, 0.7)))) for _ in range(32)]
    for batch, length, block in [*cases, (len(mixed), 0, 256)]:
        lens = [length] * batch if length else mixed
        read = sum(lens) * 2 * KV_HEADS * DIM * (kv_dtype or torch.bfloat16).itemsize
        layers = max(2, min(36, int(16e9 // read)))
        whole, attention = Scene(lens, [1] * batch, block, layers, kv_dtype).seconds()
        rows.append(
            {
                "case": f"decode {batch} x {length or 'mixed'} block {block}",
                "us": attention * 1e6,
                "us_with_qkv": whole * 1e6,
                "GB/s": read / attention / 1e9,
                "share_of_copy": read / attention / bandwidth,
            }
        )
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    return rows


def prefill_rows(rate: float, kv_dtype: torch.dtype | None) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for name, lens, fresh in (
        ("prefill 1 x 8192", [8192], [8192]),
        ("prefill 8192 behind 8192", [16384], [8192]),
        ("prefill 16 x 512", [512] * 16, [512] * 16),
        ("prefill 64 x 128", [128] * 64, [128] * 64),
    ):
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in zip(lens, fresh, strict=True))
        whole, attention = Scene(lens, fresh, 256, 4, kv_dtype).seconds()
        done = 4 * pairs * HEADS * DIM
        rows.append(
            {
                "case": name,
                "us": attention * 1e6,
                "us_with_qkv": whole * 1e6,
                "TFLOP/s": done / attention / 1e12,
                "share_of_matmul": done / attention / rate,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kv-cache-dtype", choices=list(KV_DTYPES), default="auto")
    args = parser.parse_args()
    out, kv_dtype = args.out, KV_DTYPES[args.kv_cache_dtype]
    bandwidth, rate = copy_bandwidth(), matmul_rate(torch.bfloat16)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s")
    torch.cuda.empty_cache()
    rows = decode_rows(bandwidth, kv_dtype) + prefill_rows(rate, kv_dtype)
    if out is not None:
        setting = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "kv_cache_dtype": args.kv_cache_dtype,
            "copy_bytes_per_second": bandwidth,
            "matmul_ops_per_second": rate,
        }
        out.write_text(json.dumps({**setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
