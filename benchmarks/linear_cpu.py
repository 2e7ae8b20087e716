"""Matrix products of a decoder layer on CPU: packed weights against torch's F.linear.

    python benchmarks/linear_cpu.py [--threads 2] [--layers 8]

The shapes are zipage-tiny's. Every layer has weights of its own, so that they are as cold as in a
step of the model; both are timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from zipage.evals.machine import describe_machine
from zipage.kernels.native.linear import PackedLinear

SHAPES = {"qkv": (768, 256), "o": (256, 512), "gate_up": (1536, 256), "down": (256, 768)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    layers = [[torch.randn(shape) for shape in SHAPES.values()] for _ in range(args.layers)]
    packed = [[PackedLinear(weight) for weight in weights] for weights in layers]
    products = args.layers * sum(width * depth for width, depth in SHAPES.values())
    print(describe_machine())
    print(f"{args.threads} threads, {args.layers} layers of {', '.join(SHAPES)}")
    for rows in args.rows:
        inputs = [torch.randn(rows, depth) for _, depth in SHAPES.values()]
        seconds: dict[str, list[float]] = {"torch": [], "packed": []}
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            for weights in layers:
                for x, weight in zip(inputs, weights, strict=True):
                    F.linear(x, weight)
            middle = time.perf_counter()
            for linears in packed:
                for x, linear in zip(inputs, linears, strict=True):
                    linear(x)
            seconds["torch"].append(middle - started)
            seconds["packed"].append(time.perf_counter() - middle)
        typical = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        line = f"{rows:4} rows"
        for name, value in typical.items():
            rate = 2 * rows * products / value / 1e9
            line += f"  {name} {value * 1e3:7.2f} ms {rate:4.0f} GFLOP/s"
        print(f"{line}  ratio {typical['torch'] / typical['packed']:.2f}")


if __name__ == "__main__":
    main()
