"""What the engine process costs: `EngineProcessClient` against `LLM`, in turn, the same requests.

    python -m benchmarks.process_overhead --pairs 5

prints for every pair the tokens/s of both and the CPU time of a token where the engine runs (the
client's own is left out), then the medians of the ratio and of the CPU time added by messages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from zipage import LLM, EngineProcessClient, SamplingParams
from zipage.engine.core_io import TokenUpdate
from zipage.engine.messages import StepReport, decode_from_engine, encode
from zipage.outputs import RequestMetrics

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_budget": 256,
    "block_size": 16,
    "num_kv_blocks": 2048,
    "enable_prefix_caching": False,
}


def codec_microseconds(answers: int) -> tuple[float, float]:
    """CPU time to encode and to decode one token of a report about so many answers."""
    metrics = RequestMetrics(0.1, 0.2, 0.3, prefill_time=0.1)
    report = StepReport(
        [TokenUpdate(f"chatcmpl-{i:032x}#0@{i}", [i], metrics=metrics) for i in range(answers)], 0
    )
    frame, rounds = encode(report), 300
    spent = []
    for work in (lambda: encode(report), lambda: decode_from_engine(frame)):
        started = time.process_time()
        for _ in range(rounds):
            work()
        spent.append(1e6 * (time.process_time() - started) / rounds / answers)
    return spent[0], spent[1]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(64)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)

    async def ask(client: EngineProcessClient, prompt: list[int]) -> int:
        generated = 0
        async for output in client.generate(prompt, params):
            generated = output.usage.completion_tokens
        return generated

    async def in_process(llm: LLM) -> int:
        return sum(output.usage.completion_tokens for output in llm.generate(prompts, params))

    async def through_client(client: EngineProcessClient) -> int:
        return sum(await asyncio.gather(*(ask(client, prompt) for prompt in prompts)))

    async def measure(work: Awaitable[int], pid: int) -> tuple[float, float]:
        started, cpu = time.perf_counter(), cpu_seconds(pid)
        tokens = await work
        seconds = time.perf_counter() - started
        return tokens / seconds, 1e6 * (cpu_seconds(pid) - cpu) / tokens

    async def pairs() -> None:
        client = EngineProcessClient(**OPTIONS)
        child = client.engine_pid
        with LLM(**OPTIONS) as llm:
            await in_process(llm)
            await through_client(client)
            ratios, added = [], []
            for pair in range(args.pairs):
                found = [(0.0, 0.0)] * 2
                for which in (0, 1) if pair % 2 else (1, 0):
                    work = through_client(client) if which else in_process(llm)
                    found[which] = await measure(work, child if which else os.getpid())
                (before, cpu_before), (after, cpu_after) = found
                ratios.append(after / before)
                added.append(cpu_after - cpu_before)
                print(
                    f"LLM {before:7.0f} tokens/s {cpu_before:6.1f} us, "
                    f"process {after:7.0f} tokens/s {cpu_after:6.1f} us"
                )
        client.shutdown()
        print(
            f"median ratio {statistics.median(ratios):.3f}, added by messages "
            f"{statistics.median(added):.1f} us of CPU a token"
        )

    asyncio.run(pairs())
    encoding, decoding = codec_microseconds(args.requests)
    print(f"a token's update: {encoding:.2f} us to encode, {decoding:.2f} us to decode")


if __name__ == "__main__":
    main()
