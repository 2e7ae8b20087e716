"""What HTTP costs: the same work by `LLM`, by `EngineProcessClient`, and through `zipage serve`,
streamed and not, in turn.

    python -m benchmarks.server_overhead --pairs 5
    python -m benchmarks.server_overhead --options '{"device": "cuda", "model": "DIRECTORY"}'

prints for every way, as medians over the rounds, tokens/s, the share of offline tokens/s, the time
between two tokens of a stream, and the CPU time of a token in the engine's process, in the
server's and in this one, the client's. Three processes need three idle cores for the first
figures to mean something; the CPU times show what the cores of a smaller machine would be shared
by. The client is a bare one: it reads bytes, and looks only for the end of the events. Last, the
CPU time that reporting its tokens to another process adds on the engine's own thread, from runs of
the core with and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
SERVER = ["--log-level", "warning", "--port", "0"]
TICK = os.sysconf("SC_CLK_TCK")


def flags(options: dict[str, Any]) -> list[str]:
    """Options of the engine as `zipage serve` takes them."""
    told = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if name == "model":
            told.append(str(value))
        elif isinstance(value, bool):
            told.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            told += [f"--{flag}", str(value)]
    return told


def cpu_seconds(process: int) -> float:
    """CPU time that a process has used, its threads' included."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@dataclass
class Way:
    """One way to run the work.

    Attributes:
        run: runs it; returns the tokens generated and each stream's seconds between two tokens.
        engine: process of the engine; None if it is this one.
        server: process of the server, if there is one.
    """

    name: str
    run: Callable[[], Awaitable[tuple[int, list[float]]]]
    engine: int | None = None
    server: int | None = None

    async def measure(self) -> dict[str, float]:
        """Run it once; returns its figures."""
        processes = [p for p in (self.engine, self.server) if p is not None]
        before = [cpu_seconds(p) for p in processes]
        own, started = time.process_time(), time.perf_counter()
        tokens, gaps = await self.run()
        wall, own = time.perf_counter() - started, time.process_time() - own
        used = {p: cpu_seconds(p) - b for p, b in zip(processes, before, strict=True)}
        here = 1e6 * own / tokens
        return {
            "tokens/s": tokens / wall,
            "ms between tokens": 1e3 * statistics.mean(gaps) if gaps else float("nan"),
            "engine": here if self.engine is None else 1e6 * used[self.engine] / tokens,
            "server": 0.0 if self.server is None else 1e6 * used[self.server] / tokens,
            "client": 0.0 if self.engine is None else here,
        }


def offline(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Way:
    """`LLM` in this process."""

    async def run() -> tuple[int, list[float]]:
        outputs = llm.generate(prompts, params)
        return sum(output.usage.completion_tokens for output in outputs), []

    return Way("LLM", run)


def by_process(
    client: EngineProcessClient, prompts: list[list[int]], params: SamplingParams
) -> Way:
    """`EngineProcessClient` in this process."""

    async def ask(prompt: list[int]) -> tuple[int, float]:
        first, tokens = 0.0, 0
        async for output in client.generate(prompt, params):
            first = first or time.perf_counter()
            tokens = output.usage.completion_tokens
        return tokens, (time.perf_counter() - first) / max(1, tokens - 1)

    async def run() -> tuple[int, list[float]]:
        done = await asyncio.gather(*map(ask, prompts))
        return sum(tokens for tokens, _ in done), [gap for _, gap in done]

    return Way("process", run, client.engine_pid)


def over_http(
    url: str, server: int, engine: int, prompts: list[list[int]], params: SamplingParams, api: str
) -> Way:
    """A server; `api` is ``stream``, ``chat stream`` or ``whole``."""
    place, streams = urlsplit(url), api != "whole"
    fields = {"max_tokens": params.max_tokens, "ignore_eos": True, "temperature": 0}

    def request(prompt: list[int]) -> bytes:
        body: dict[str, Any] = {**fields, "stream": streams}
        path = "/v1/completions"
        if api == "chat stream":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt[:20]))}]
        else:
            body["prompt"] = prompt
        data = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        return (head + data).encode()

    async def ask(prompt: list[int]) -> tuple[int, float]:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request(prompt))
        answer, first = bytearray(), 0.0
        while chunk := await reader.read(1 << 16):
            first = first or time.perf_counter()
            answer += chunk
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200") or (streams and b"[DONE]" not in answer):
            raise RuntimeError(bytes(answer[:2000]).decode())
        assert params.max_tokens is not None
        return params.max_tokens, (time.perf_counter() - first) / (params.max_tokens - 1)

    async def run() -> tuple[int, list[float]]:
        done = await asyncio.gather(*map(ask, prompts))
        return sum(tokens for tokens, _ in done), [gap for _, gap in done] if streams else []

    return Way(f"HTTP {api}", run, engine, server)


async def compare(ways: list[Way], pairs: int) -> None:
    """Run all ways in turn, and print medians."""
    for way in ways:
        await way.measure()
    rounds: list[list[dict[str, float]]] = []
    for number in range(pairs):
        order = ways if number % 2 else ways[::-1]
        found = {way.name: await way.measure() for way in order}
        rounds.append([found[way.name] for way in ways])
    print(f"{'':18}{'tokens/s':>9}{'share':>7}{'ms between':>12}   us of CPU a token in")
    print(f"{'':18}{'':>9}{'':>7}{'tokens':>12}{'engine':>9}{'server':>9}{'client':>9}")
    for index, way in enumerate(ways):
        median = {
            name: statistics.median(one[index][name] for one in rounds) for name in rounds[0][0]
        }
        share = statistics.median(one[index]["tokens/s"] / one[0]["tokens/s"] for one in rounds)
        print(
            f"{way.name:18}{median['tokens/s']:9.0f}{share:7.3f}{median['ms between tokens']:12.2f}"
            f"{median['engine']:9.0f}{median['server']:9.0f}{median['client']:9.0f}"
        )


def added_microseconds(
    options: dict[str, Any], prompts: list[list[int]], params: SamplingParams, pairs: int
) -> float:
    """CPU time of a token on the engine's thread with reports, less that without."""
    core, serial = EngineCore(EngineConfig(**options)), itertools.count()
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
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--options", type=json.loads, default={}, help="engine options, JSON")
    args = parser.parse_args()
    options = OPTIONS | args.options
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(64)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    command = [sys.executable, "-m", "zipage", "serve", *SERVER, *flags(options)]
    client = EngineProcessClient(**options)
    try:
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
            LLM(**options) as llm,
        ):
            try:
                assert server.stderr is not None
                told, found = "", None
                while found is None:
                    line = server.stderr.readline()
                    if not line:
                        raise RuntimeError(told)
                    told += line
                    found = re.search(r" at (http\S+) ", line)
                children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
                where = (found.group(1), server.pid, int(children.split()[0]))
                ways = [offline(llm, prompts, params), by_process(client, prompts, params)]
                ways += [
                    over_http(*where, prompts, params, api)
                    for api in ("stream", "chat stream", "whole")
                ]
                asyncio.run(compare(ways, args.pairs))
            finally:
                server.terminate()
    finally:
        client.shutdown()
    added = added_microseconds(options, prompts, params, args.pairs)
    print(f"reporting adds {added:.1f} us of CPU a token on the engine's thread")


if __name__ == "__main__":
    main()
