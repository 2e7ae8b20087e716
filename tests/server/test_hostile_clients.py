"""Clients that send half of something, far too much or nothing at all; others must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import CHAT, SUM, Process, wait_until
from tests.server.test_errors import TOOL
from tests.server.test_lifecycle import connection
from tests.server.wire import Wire

COMPLETIONS = "/v1/completions"
FLAGS = ["--num-kv-blocks", "300", "--block-size", "16", "--kv-budget", "none", "--port", "0"]
FLAGS += ["--max-model-len", "1500", "--log-level", "warning"]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def silent_connections(url: str, counts: dict[bytes, int]) -> Iterator[list[socket.socket]]:
    """Connections that say so much and no more."""
    place = urlsplit(url)
    made = []
    for data, count in counts.items():
        for _ in range(count):
            made.append(socket.create_connection((place.hostname, place.port), timeout=30))
            made[-1].sendall(data)
    yield made
    for one in made:
        one.close()


@contextlib.contextmanager
def limit_of_files(soft: int) -> Iterator[None]:
    """Another limit for this process and those it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """URL of a server in a process of its own, where nothing else holds up its event loop."""
    server = Process(*FLAGS)
    yield server.url
    assert server.stop() == 0


class Waits:
    """Asks for /health and tokens of a short text all the time; the seconds the answers took."""

    def __init__(self, url: str) -> None:
        self.waits: list[float] = []
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._stop.wait(0.005):
                begun = time.perf_counter()
                assert http.get("/health").status_code == 200
                assert http.post("/tokenize", json={"prompt": "Add"}).status_code == 200
                self.waits.append(time.perf_counter() - begun)

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self.waits

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


async def streams(server: Process, body: dict[str, Any], count: int) -> list[str]:
    """Streams in the middle of which the server is told to end."""
    wires = [Wire(server.url) for _ in range(count)]
    for wire in wires:
        await wire.send(COMPLETIONS, body)
    assert {await wire.head() for wire in wires} == {(200, None)}
    server.process.send_signal(signal.SIGTERM)
    texts = [await wire.body(None) for wire in wires]
    for wire in wires:
        wire.close()
    return texts


@pytest.mark.slow
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="needs 4096 open files"
)
def test_silent_connections_and_the_end_under_load(processes: list[Process]) -> None:
    """A thousand idle connections, some with half a head or half a body, more than the usual limit
    of open files; clients that do not read; and SIGTERM in the middle of streams."""
    with limit_of_files(512):
        server = Process(*FLAGS, "--drain-timeout", "6")
    processes.append(server)
    counts = {
        b"GET /health HTTP/1.1\r\nHost: z\r\n\r\n": 1000,
        b"": 100,
        HEAD[:60]: 100,
        HEAD + b"Content-Length: 50\r\n\r\n{": 20,
    }
    body = {"prompt": SUM, "max_tokens": 60, "ignore_eos": True, "stream": True}
    deaf = {**body, "max_tokens": 1400, "n": 4, "logprobs": 20}
    with limit_of_files(4096), silent_connections(server.url, counts) as silent:
        assert silent[0].recv(1000).startswith(b"HTTP/1.1 200")
        with Waits(server.url) as waits:
            alone = httpx.post(f"{server.url}{COMPLETIONS}", json={**body, "stream": False})
        assert statistics.median(waits) < 0.1
        unread = [connection(server.url, deaf, receive_buffer=4096) for _ in range(3)]
        for text in asyncio.run(streams(server, body, 16)):
            assert text.endswith("data: [DONE]\n\n"), text[-300:]
            events = [json.loads(e[6:]) for e in text.split("\n\n")[:-2]]
            said = "".join(e["choices"][0]["text"] for e in events)
            assert said == alone.json()["choices"][0]["text"]
        begun = time.monotonic()
        assert server.process.wait(30) == 0
        assert time.monotonic() - begun < 15, "the deadline of the drain is 6 s"
        for one in unread:
            one.close()


@pytest.mark.slow
def test_an_engine_that_is_killed_is_started_again(processes: list[Process]) -> None:
    server = Process(*FLAGS, "--on-engine-death", "restart")
    processes.append(server)
    number = server.process.pid
    body = {"prompt": SUM, "max_tokens": 1400, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        alone = http.post(COMPLETIONS, json={**body, "max_tokens": 30}).json()["choices"]
        with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["type"] == "service_unavailable_error"
        refused = http.post(COMPLETIONS, json=body)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert http.get("/health").status_code == 503
        wait_until(lambda: http.get("/health").status_code == 200, 60)
        again = http.post(COMPLETIONS, json={**body, "max_tokens": 30})
        assert again.json()["choices"] == alone
    assert server.stop() == 0


BIG = 10_000_000
LARGE_BODIES = {
    "text": {"prompt": "Add these numbers. " * (BIG // 19)},
    "token ids": {"prompt": [298] * (BIG // 5)},
    "many messages": {"messages": [{"role": "user", "content": "a"}] * (BIG // 35)},
    "many tools": {"messages": CHAT, "tools": [TOOL] * (BIG // 50)},
    "stop": {"prompt": SUM, "stop": ["abcd"] * (BIG // 8)},
    "unknown field": {"prompt": SUM, "max_tokens": 1, "x": ["abc"] * (BIG // 7)},
    "unknown lists": {"prompt": SUM, "max_tokens": 1, "x": [[1]] * (BIG // 5)},
    "unknown keys": {"prompt": SUM, **{f"k{n}": 0 for n in range(BIG // 11)}},
    "prompts": {"prompt": [[298]] * (BIG // 7)},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}] * (BIG // 32)},
        ]
    },
    "bias": {"prompt": SUM, "logit_bias": {str(n): 1 for n in range(BIG // 14)}},
}


@pytest.mark.parametrize("kind", list(LARGE_BODIES))
def test_a_body_of_ten_megabytes_holds_nobody_up(busy: str, kind: str) -> None:
    body = LARGE_BODIES[kind]
    data = json.dumps(body).encode()
    assert len(data) > 0.9 * BIG
    path = "/v1/chat/completions" if "messages" in body else COMPLETIONS
    headers = {"Content-Type": "application/json"}
    with Waits(busy) as waits:
        answer = httpx.post(f"{busy}{path}", content=data, headers=headers, timeout=60)
    if not kind.startswith("unknown"):
        assert answer.status_code == 400
        assert len(answer.text) < 1000
    assert max(waits) < 1.0, waits


def test_a_large_answer_holds_nobody_up(busy: str) -> None:
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 20}
    body |= {"n": 8, "max_tokens": 700, "ignore_eos": True, "temperature": 1.0}
    with Waits(busy) as waits:
        answer = httpx.post(f"{busy}/v1/chat/completions", json=body, timeout=120)
    assert len(answer.json()["choices"]) == 8 and len(answer.content) > 5_000_000
    assert max(waits) < 1.0, sorted(waits)[-9:]
