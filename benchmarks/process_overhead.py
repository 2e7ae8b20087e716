"""What the engine process costs: `EngineProcessClient` against `LLM`, in turn, the same requests.

    python -m benchmarks.process_overhead --pairs 5

prints the tokens/s of both in every pair and the median ratio (two idle cores are needed: the
client makes text on one while the engine runs on the other), then the CPU time that reporting adds
to a token on the engine's thread, from runs of the core with and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import socket
import statistics
import threading
import time
from typing import Any

from zipage import LLM, EngineConfig, EngineProcessClient, SamplingParams
from zipage.engine.channel import Channel
from zipage.engine.core import EngineCore
from zipage.engine.core_io import EngineRequest
from zipage.engine.messages import StepReport, encode

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_budget": 256,
    "block_size": 16,
    "num_kv_blocks": 2048,
    "enable_prefix_caching": False,
}


async def throughput(prompts: list[list[int]], params: SamplingParams, pairs: int) -> None:
    """Run both in turn and print their tokens/s."""

    async def ask(client: EngineProcessClient, prompt: list[int]) -> int:
        generated = 0
        async for output in client.generate(prompt, params):
            generated = output.usage.completion_tokens
        return generated

    async def through_client(client: EngineProcessClient) -> float:
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        return sum(counts) / (time.perf_counter() - started)

    def in_process(llm: LLM) -> float:
        started = time.perf_counter()
        counts = [output.usage.completion_tokens for output in llm.generate(prompts, params)]
        return sum(counts) / (time.perf_counter() - started)

    client = EngineProcessClient(**OPTIONS)
    with LLM(**OPTIONS) as llm:
        in_process(llm)
        await through_client(client)
        ratios = []
        for pair in range(pairs):
            rates = [0.0, 0.0]
            for which in (0, 1) if pair % 2 else (1, 0):
                rates[which] = await through_client(client) if which else in_process(llm)
            ratios.append(rates[1] / rates[0])
            print(f"LLM {rates[0]:7.0f}, process {rates[1]:7.0f} tokens/s: {ratios[-1]:.3f}")
    client.shutdown()
    print(f"median ratio {statistics.median(ratios):.3f}")


def added_microseconds(prompts: list[list[int]], params: SamplingParams, pairs: int) -> float:
    """CPU time of a token on the engine's thread with reports, less that without."""
    core, serial = EngineCore(EngineConfig(**OPTIONS)), itertools.count()
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    drain = threading.Thread(target=lambda: all(iter(lambda: theirs.recv(1 << 20), b"")))
    drain.start()

    def run(report: bool) -> float:
        for index, prompt in enumerate(prompts):
            name = f"async-{index:032x}"
            names = [f"{name}#0@{next(serial)}"]
            request = EngineRequest(name, names, prompt, params, params.max_tokens or 1, 17)
            request.stream = report
            core.submit(request)
        tokens, started = 0, time.thread_time()
        while core.has_unfinished:
            updates = core.step()
            if report:
                channel.send(encode(StepReport(updates, core.num_waiting)))
            tokens += sum(len(update.token_ids) for update in updates)
        return 1e6 * (time.thread_time() - started) / tokens

    run(report=False)
    added = [run(report=True) - run(report=False) for _ in range(pairs)]
    channel.close()
    drain.join()
    theirs.close()
    return statistics.median(added)


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(64)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    asyncio.run(throughput(prompts, params, args.pairs))
    added = added_microseconds(prompts, params, args.pairs)
    print(f"reporting adds {added:.1f} us of CPU a token on the engine's thread")


if __name__ == "__main__":
    main()
