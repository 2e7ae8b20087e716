"""What sampling adds to a decode step on a CUDA device, against one read of the logits.

For each batch and kind of sampling: the device's time of `Sampler.launch` alone, its logits and
their maxima given as a decode graph gives them, and the host's time to queue it; beside that the
time in which the logits are read once at the bandwidth of a copy measured in the same run.

    python benchmarks/sampling_gpu.py [--vocab-size 151936] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from device_rates import DEVICE, copy_bandwidth

from zipage import SamplingParams
from zipage.execution.sampler import Sampler, SamplingState

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "Qwen3 (0.6, top_p 0.95, top_k 20)": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    "top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "top_p 0.95, flat": SamplingParams(temperature=3.0, top_p=0.95),
    "Qwen3, presence_penalty 1": SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.0
    ),
    "Qwen3, logprobs 5": SamplingParams(temperature=0.6, top_p=0.95, top_k=20, logprobs=5),
}


def measure(logits: torch.Tensor, params: SamplingParams, repeats: int = 30) -> tuple[float, float]:
    """Median microseconds of the device and of the host for one launch."""
    sampler = Sampler(0, device=DEVICE)
    prompt = list(range(0, 2000, 2))
    vocab_size = logits.shape[1]
    states = [SamplingState(params, prompt, [], (0,), vocab_size, i) for i in range(len(logits))]
    peaks, tokens = logits.max(dim=-1)
    last, device_times, host_times = tokens, [], []
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    for repeat in range(repeats + 5):
        unread = [repeat > 0] * len(states)
        waiting = last.tolist()
        flush.zero_()  # the logits of a real step are in L2 in part at most
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)  # so that the device never waits for the host
        start.record()
        begun = time.perf_counter()
        launched = sampler.launch(logits, states, (peaks, tokens), unread, last)
        host_times.append(time.perf_counter() - begun)
        end.record()
        launched.wait()
        last = launched.token_ids
        for state, token in zip(states, waiting, strict=True):
            state.output_token_ids += [token] if repeat else []
        torch.cuda.synchronize()
        device_times.append(start.elapsed_time(end) * 1e-3)
    return 1e6 * statistics.median(device_times[5:]), 1e6 * statistics.median(host_times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, bf16 logits")
    records = []
    generator = torch.Generator(DEVICE).manual_seed(0)
    for batch in (1, 32, 96, 256):
        logits = torch.randn(batch, args.vocab_size, generator=generator, device=DEVICE) * 3
        logits = logits.bfloat16()
        floor = 1e6 * logits.nbytes / bandwidth
        print(f"batch {batch}: one read {floor:.1f} us")
        for name, params in KINDS.items():
            device, host = measure(logits, params)
            print(f"  {name:36} device {device:8.1f} us   host {host:8.1f} us", flush=True)
            records.append(
                {"batch": batch, "kind": name, "device_us": device, "host_us": host, "floor": floor}
            )
    if args.out:
        args.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
