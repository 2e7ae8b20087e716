"""Many clients at once, well-behaved and not. `ZIPAGE_LOAD_SECONDS=600 ZIPAGE_LOAD_CLIENTS=200` is
the long run; its figures are printed (`pytest -s`)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import SUM, Process

SECONDS = float(os.environ.get("ZIPAGE_LOAD_SECONDS", "20"))
CLIENTS = int(os.environ.get("ZIPAGE_LOAD_CLIENTS", "60"))
POOL_TOKENS = 16 * 400
SUMS = [SUM.replace("74", f"{a}").replace("79", f"{b}") for a, b in [(11, 22), (74, 9), (35, 62)]]
BAD = [b'{"prompt": NaN}', b"{}", b'{"prompt": "Add", "n": -1}', b'{"prompt": [320]}']
#: Asks for /health in a process of its own, so that the clients' work is not measured with it.
PROBE = """
import http.client, sys, time
end, waits = time.time() + float(sys.argv[2]), []
connection = http.client.HTTPConnection(sys.argv[1])
while time.time() < end:
    begun = time.perf_counter()
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    waits.append(time.perf_counter() - begun)
    time.sleep(0.05)
print(sorted(waits)[int(len(waits) * 0.99)])
"""


def megabytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found.group(1)) // 1024


async def act(http: httpx.AsyncClient, rng: random.Random, solo: dict[str, str]) -> str:
    """What one client does once; returns what came of it."""
    text = rng.choice(SUMS)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    kind = rng.choice(["stream", "stream", "slow", "leaves", "whole", "gives up", "bad", "batch"])
    if kind == "bad":
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=rng.choice(BAD), headers=headers)
        return f"bad {answer.status_code}"
    if kind == "batch":
        body = {"prompt": SUMS, "n": 2, "max_tokens": 5}
        answer = await http.post("/v1/completions", json=body)
        return f"batch {answer.status_code}"
    if kind == "gives up":
        body = {"prompt": text, "max_tokens": 900, "ignore_eos": True}
        try:
            await http.post("/v1/completions", json=body, timeout=rng.random())
        except httpx.TimeoutException:
            return "gave up"
        return "was refused"
    if kind == "whole":
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
            return "429"
        content = answer.json()["choices"][0]["message"]["content"]
        return "right" if content == solo[text] else f"wrong: {answer.text}"
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
            return "429"
        content, patience = "", rng.randint(1, 40)
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "right" if content == solo[text] else f"wrong: {content}"
            if line:
                for choice in json.loads(line[6:])["choices"]:
                    content += choice["delta"].get("content") or ""
                patience -= 1
            if kind == "leaves" and patience <= 0:
                return "left"
            if kind == "slow":
                await asyncio.sleep(0.01)
    return f"lost: {content}"


async def load(url: str) -> Counter[str]:
    async with httpx.AsyncClient(
        base_url=url, timeout=180, limits=httpx.Limits(max_connections=None)
    ) as http:
        solo = {}
        for text in SUMS:
            body = {"messages": [{"role": "user", "content": text}]}
            answer = await http.post("/v1/chat/completions", json=body)
            solo[text] = answer.json()["choices"][0]["message"]["content"]
        assert len(set(solo.values())) == len(SUMS)
        end, seen = time.monotonic() + SECONDS, Counter[str]()

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                seen[await act(http, rng, solo)] += 1

        await asyncio.gather(*map(client, range(CLIENTS)))
        await fill_pool(http)
        return seen


async def fill_pool(http: httpx.AsyncClient) -> None:
    """A request that needs all blocks; it is answered if all of them are free."""
    body = {"prompt": [6] * (POOL_TOKENS - 100), "max_tokens": 90, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 90, answer.text


@pytest.mark.slow
def test_load(processes: list[Process]) -> None:
    flags = ["--block-size", "16", "--num-kv-blocks", "400", "--kv-budget", "none"]
    flags += ["--max-num-seqs", "64", "--max-queued-requests", "60", "--log-level", "warning"]
    server = Process(*flags, "--port", "0")
    processes.append(server)
    number = server.process.pid
    numbers = [
        number,
        *map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split()),
    ]
    asyncio.run(load_briefly(server.url))
    before = [megabytes(n) for n in numbers]
    command = [sys.executable, "-c", PROBE, server.url[7:], str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
        seen = asyncio.run(load(server.url))
        told, _ = probe.communicate(timeout=60)
    after = [megabytes(n) for n in numbers]
    print(f"\n{dict(seen)}; MB {before} -> {after}; p99 of /health {1000 * float(told):.0f} ms")
    legal = {"right", "left", "gave up", "was refused", "429", "bad 400", "batch 200", "batch 429"}
    assert set(seen) <= legal and seen["right"] > CLIENTS
    assert sum(after) - sum(before) < 60
    assert float(told) < 1.0, "on a machine that does nothing else it is below 0.1"
    assert server.stop() == 0
    assert len(server.lines) == 1, server.lines


async def load_briefly(url: str) -> None:
    """Whatever is allocated once is allocated."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": SUMS * 20, "max_tokens": 20, "n": 2}
        await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
        await fill_pool(http)
