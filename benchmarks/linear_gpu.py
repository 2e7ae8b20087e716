"""Matrix products of a layer on a CUDA device: the library's, fp8, and batch-invariant ones.

For the weights of an 8B model (hidden 4096, intermediate 12288, 32/8 heads of 128) and its output
head, microseconds at several numbers of rows, the weight's bytes over that time as a share of the
bandwidth of a copy, and the error against float64. fp8 includes nothing but the product; what
quantises activations is timed apart, beside the bf16 kernels it takes the place of.

    python benchmarks/linear_gpu.py [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device_rates import DEVICE, copy_bandwidth, timed

from zipage.kernels.triton.elementwise import add_rms_norm, silu_mul
from zipage.kernels.triton.linear import linear, scaled_linear
from zipage.kernels.triton.quantise import TritonElementwise
from zipage.models.fp8 import Fp8Rows, quantise

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
ROWS = (1, 16, 48, 96, 128, 256, 2048, 8192)
#: Copies of a weight that are gone through in turn, so that L2 holds none.
_CYCLED_BYTES = 400 << 20


def scaled_mm(x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, fast: bool) -> torch.Tensor:
    """torch's scaled product, summed in fewer bits if `fast`."""
    return torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales,
        scale_b=scale.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def scaled_invariant(x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scaled_linear(x, weight, scale, None, torch.bfloat16)


def cycle(multiply: Callable[..., torch.Tensor], x: Any, weights: list[Any]) -> torch.Tensor:
    """The products of `x` with all weights; the first one's result."""
    first = multiply(x, *weights[0])
    for weight in weights[1:]:
        multiply(x, *weight)
    return first


def product_rows(bandwidth: float) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = []
    for name, (outputs, inputs) in SHAPES.items():
        count = max(1, _CYCLED_BYTES // (outputs * inputs))
        plain: list[Any] = []
        fp8: list[Any] = []
        for _ in range(count):
            weight = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)
            plain.append((weight,))
            if name != "head":  # it stays in bf16
                matrix = quantise(weight)
                fp8.append((matrix.values, matrix.scales[:, 0].contiguous()))
        ways: dict[str, tuple[Callable[..., torch.Tensor], list[Any]]] = {
            "bf16": (F.linear, plain),
            "bf16 invariant": (linear, plain),
            "fp8": (functools.partial(scaled_mm, fast=False), fp8),
            "fp8 fast": (functools.partial(scaled_mm, fast=True), fp8),
            "fp8 invariant": (scaled_invariant, fp8),
        }
        for rows in ROWS if fp8 else ROWS[:6]:
            x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
            exact = x[:64].double() @ plain[0][0].double().t()
            for way, (multiply, weights) in ways.items():
                if not weights:
                    continue
                given = x if weights is plain else quantise(x)
                work = functools.partial(cycle, multiply, given, weights)
                error = (work()[:64].double() - exact).norm() / exact.norm()
                seconds = timed(work, repeats=7) / count
                size = sum(t.nbytes for t in weights[0])
                found.append(
                    {
                        "case": f"{name} {rows} rows {way}",
                        "us": seconds * 1e6,
                        "share_of_copy": size / seconds / bandwidth,
                        "TFLOP/s": 2 * rows * outputs * inputs / seconds / 1e12,
                        "relative_error": error.item(),
                    }
                )
                print(found[-1], flush=True)
        del plain, fp8, ways
        torch.cuda.empty_cache()
    return found


def repeat(work: Callable[[], object]) -> None:
    for _ in range(10):
        work()


def elementwise_rows() -> list[dict[str, float | str]]:
    between = TritonElementwise()
    found: list[dict[str, float | str]] = []
    weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    for rows in (1, 96, 8192):
        x = torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
        gate_up = torch.randn(rows, 24576, device=DEVICE, dtype=torch.bfloat16)
        ways: dict[str, Callable[[], object]] = {
            "norm": functools.partial(add_rms_norm, x, None, weight, 1e-6),
            "add, norm, quantise": functools.partial(
                between.quantise_rms_norm, x, torch.zeros_like(x), weight, 1e-6
            ),
            "quantise": functools.partial(between.quantise, x),
            "silu_mul": functools.partial(silu_mul, gate_up),
            "silu_mul, quantise": functools.partial(between.quantise_silu_mul, gate_up),
        }
        for way, work in ways.items():
            seconds = timed(functools.partial(repeat, work)) / 10
            found.append({"case": f"{way} {rows} rows", "us": seconds * 1e6})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    torch.cuda.empty_cache()
    with torch.inference_mode():
        rows = elementwise_rows() + product_rows(bandwidth)
    if out is not None:
        setting = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_second": bandwidth,
        }
        out.write_text(json.dumps({**setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
