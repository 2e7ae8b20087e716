"""Many clients at once, well-behaved and not, and a server that must not mind. The long form's
figures are in docs/serving.md (`pytest -s -m slow tests/server/test_load.py`)."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import SUM, Process, read_events, wait_until
from tests.server.wire import Gone, Wire

POOL_TOKENS = 16 * 500
FLAGS = ["--block-size", "16", "--num-kv-blocks", "500", "--max-model-len", "8000"]
FLAGS += ["--kv-budget", "none", "--max-num-seqs", "64", "--stall-timeout", "2", "--port", "0"]
FLAGS += ["--log-level", "warning"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BAD = [b'{"prompt": NaN}', b"{}", b'{"prompt": "Add", "n": -1}', b'{"prompt": [320]}', b"[["]
ENDLESS = {"prompt": SUM, "max_tokens": 2000, "ignore_eos": True}
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
print(*(sorted(waits)[int(len(waits) * share)] for share in (0.5, 0.99)))
"""


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds, most of which are answered differently."""
    rng, made = random.Random(5), []
    for number in range(count):
        text = SUM.replace("74", f"{rng.randint(1, 99)}").replace("79", f"{number}")
        body: dict[str, Any] = {"max_tokens": rng.randint(20, 160), "return_token_ids": True}
        if number % 2:
            body |= {"temperature": 1.0, "seed": number, "top_p": rng.choice([1.0, 0.9])}
        if rng.random() < 0.3:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.3:
            body["stop"] = rng.choice([["7"], ["So ", "= 1"], ["\n\n"]])
        if rng.random() < 0.3:
            body |= {"kv_budget": 64, "ignore_eos": True, "max_tokens": 200}
        chat, logprobs = rng.random() < 0.5, rng.random() < 0.3
        if chat:
            body["messages"] = [{"role": "user", "content": text}]
            body |= {"logprobs": True, "top_logprobs": 3} if logprobs else {}
        else:
            body["prompt"] = text
            body |= {"logprobs": 3, "echo": rng.random() < 0.5} if logprobs else {}
        made.append((CHATS if chat else COMPLETIONS, body))
    return made


def read(path: str, text: str, streamed: bool, request_id: str) -> dict[str, Any]:
    """What an answer says, the same for a stream and for one that is not streamed."""
    parts = read_events(text) if streamed else [json.loads(text), "[DONE]"]
    assert parts.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        assert part["id"].endswith(request_id), f"{request_id} got a part of {part['id']}"
        for choice in part["choices"]:
            told = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
            said = choice if path == COMPLETIONS else choice["delta" if streamed else "message"]
            for name in ("text", "reasoning_content", "content"):
                told[name] = told.get(name, "") + (said.get(name) or "")
            told["ids"] += choice.get("token_ids") or []
            logprobs = choice["logprobs"] or {}
            told["logprobs"] += logprobs.get("content") or []
            told["logprobs"] += zip(
                *(logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "text_offset")),
                strict=True,
            )
            assert "end" not in told, "it goes on after its end"
            if choice["finish_reason"] is not None:
                told["end"] = (choice["finish_reason"], choice["stop_reason"])
    usage = {name: value for name, value in parts[-1]["usage"].items() if value is not None}
    del usage["prompt_tokens_details"]  # what is cached depends on who else is there
    return {"choices": choices, "usage": usage}


class Load:
    """Clients, and what they saw.

    Attributes:
        memory: of the processes, in MB, sampled while there are clients.
        alone: what each request is answered when nothing else runs.
        seen: how often what came of a request.
        wrong: answers that are not those.
    """

    def __init__(self, url: str, processes: list[int], kinds: int) -> None:
        self.url, self.processes, self.requests = url, processes, requests(kinds)
        self.memory: list[list[float]] = []
        self.alone: list[dict[str, Any]] = []
        self.seen: Counter[str] = Counter()
        self.wrong: list[Any] = []

    async def run(self, clients: int, seconds: float) -> None:
        """Learn the answers, then let the clients loose, then see whether all blocks are free."""
        wire = Wire(self.url)
        for path, body in self.requests:
            await wire.send(path, body, "alone")
            status, text = await wire.answer()
            assert status == 200, text
            self.alone.append(read(path, text, False, "alone"))
        distinct = {json.dumps(answer) for answer in self.alone}
        assert len(distinct) > 0.8 * len(self.alone), "answers of others must be noticed"
        watching = asyncio.create_task(self.watch())
        await asyncio.gather(*(self.client(number, seconds) for number in range(clients)))
        watching.cancel()
        wire.close()
        # A request that needs every block; it is answered if no other has any.
        prompt = [6] * (POOL_TOKENS - 100)
        await wire.send(COMPLETIONS, {"prompt": prompt, "max_tokens": 99, "ignore_eos": True})
        status, text = await wire.answer()
        assert json.loads(text)["usage"]["completion_tokens"] == 99, text
        wire.close()

    async def watch(self) -> None:
        """Look at the memory of the processes now and then."""
        while True:
            self.memory.append([resident(process) for process in self.processes])
            await asyncio.sleep(1)

    async def client(self, number: int, seconds: float) -> None:
        rng, wire = random.Random(number), Wire(self.url)
        end, serial = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            serial += 1
            kind = rng.choice(["stream"] * 4 + ["whole", "slow", "leaves", "gives up", "bad"])
            if rng.random() < 0.02:
                kind = "deaf"
            self.seen[await self.act(kind, rng, wire, f"{number}-{serial}")] += 1
        wire.close()

    async def act(self, kind: str, rng: random.Random, wire: Wire, name: str) -> str:
        """One request of a client; returns what came of it."""
        if kind == "bad":
            await wire.send(COMPLETIONS, rng.choice(BAD))
            return f"bad: {(await wire.answer())[0]}"
        if kind == "deaf":
            wire = Wire(self.url, 4096)
            await wire.send(COMPLETIONS, {**ENDLESS, "stream": True, "n": 3, "logprobs": 20})
            await asyncio.sleep(4)
            wire.close(abruptly=True)
            return "deaf"
        which = rng.randrange(len(self.requests))
        path, body = self.requests[which]
        streamed = kind in ("stream", "slow", "leaves") or rng.random() < 0.3
        if streamed:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if kind in ("leaves", "gives up"):
            # On a connection of its own, which ends in the middle of the answer, or before it.
            wire, patience = Wire(self.url), rng.random()
            await wire.send(path, {**body, **ENDLESS} if path == COMPLETIONS else body, name)
            if kind == "leaves":
                await wire.reader.read(1)
                patience *= 0.2
            await asyncio.sleep(patience)
            wire.close(abruptly=rng.random() < 0.5)
            return kind
        await wire.send(path, body, name)
        try:
            status, text = await wire.answer(0.01 if kind == "slow" else 0.0)
            told = read(path, text, streamed, name) if status == 200 else status
        except (Gone, AssertionError, KeyError, ValueError) as error:
            told = repr(error)
        if told == self.alone[which]:
            return f"{'stream' if streamed else 'whole'}: right"
        self.wrong.append((kind, body, told, self.alone[which]))
        return f"{kind}: wrong"


def resident(process: int) -> float:
    """Memory in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found.group(1)) / 1024


def growth(samples: list[float]) -> float:
    """What the slope of the last two thirds of the samples comes to over their time."""
    late = samples[len(samples) // 3 :]
    middle, mean = (len(late) - 1) / 2, sum(late) / len(late)
    products = sum((at - middle) * (value - mean) for at, value in enumerate(late))
    return products / sum((at - middle) ** 2 for at in range(len(late))) * len(late)


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.parametrize(
    ("clients", "seconds"), [(40, 8.0), pytest.param(200, 600.0, marks=pytest.mark.slow)]
)
def test_load(processes: list[Process], clients: int, seconds: float) -> None:
    server = Process(*FLAGS)
    processes.append(server)
    number = server.process.pid
    children = Path(f"/proc/{number}/task/{number}/children").read_text()
    numbers = [number, *map(int, children.split())]
    files = open_files(number)
    load = Load(server.url, numbers, 8 if seconds < 60 else 40)
    command = [sys.executable, "-c", PROBE, server.url[7:], str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
        asyncio.run(load.run(clients, seconds))
        told, _ = probe.communicate(timeout=60)
    median, slow = (1000 * float(value) for value in told.split())
    grown = [growth(list(one)) for one in zip(*load.memory, strict=True)]
    waited = int(Path(f"/proc/{number}/schedstat").read_text().split()[1]) / 1e9
    every = max(1, len(load.memory) // 10)
    over_time = [[round(mb) for mb in one] for one in load.memory[::every]]
    print(
        f"\n{clients} clients, {seconds:g} s: {dict(sorted(load.seen.items()))}\n"
        f"/health: median {median:.0f} ms, p99 {slow:.0f} ms; the server waited {waited:.0f} s "
        f"for a core\nMB {over_time}, grown {grown}"
    )
    assert not load.wrong, load.wrong[0]
    legal = {"stream: right", "whole: right", "leaves", "gives up", "deaf", "bad: 400"}
    assert set(load.seen) <= legal and load.seen["stream: right"] > clients
    assert max(grown) < 30 if seconds < 60 else max(grown) < 10
    assert slow < 1000, "on a machine that does nothing else it is below 100"
    wait_until(lambda: open_files(number) <= files)
    assert server.stop() == 0
    assert len(server.lines) == 1, server.lines
