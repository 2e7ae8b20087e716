"""What a CUDA device can do, measured: the ceilings of the other benchmarks, and how they time."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda")


def timed(work: Callable[[], object], repeats: int = 20, graphed: bool = True) -> float:
    """Median seconds of `work`, by default replayed as a graph of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    run = work
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        run = graph.replay
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GiB."""
    source = torch.empty(1 << 30, dtype=torch.int32, device=DEVICE).random_()
    target = torch.empty_like(source)
    # Not in a graph, where a copy can become the work of a slower copy engine.
    return 2 * source.nbytes / timed(lambda: target.copy_(source), graphed=False)


def matmul_rate(dtype: torch.dtype) -> float:
    """Operations a second of a product of 8192 x 8192 matrices."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=dtype)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    return 2 * 8192**3 / timed(lambda: torch.mm(a, b, out=out), graphed=False)
