"""Clients that go away or never read, large bodies, keys, and the end, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import SUM, listening, wait_until
from zipage import AsyncLLM
from zipage.server import streaming

ENDLESS = {"prompt": SUM, "max_tokens": 1900, "ignore_eos": True}


def is_idle(engine: AsyncLLM) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == stats.blocks_owned == 0


def connection(url: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request was sent."""
    place = urlsplit(url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((place.hostname, place.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Length: {len(data)}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away(engine: AsyncLLM, live: str, stream: bool) -> None:
    steps = engine.stats().last_step.index
    client = connection(live, {**ENDLESS, "stream": stream})
    wait_until(lambda: engine.stats().running == 1)
    if stream:
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    client.close()
    wait_until(lambda: is_idle(engine))
    assert engine.stats().last_step.index - steps < 1000, "it was not run to its end"


@pytest.mark.parametrize("stream", [True, False])
def test_its_blocks_are_back_within_two_steps(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Two steps after the server has seen that the client went away, while others go on."""
    steps: list[tuple[float, int]] = []
    seen: list[float] = []
    wait_for_end = streaming._disconnected

    async def noticing(receive: Any) -> None:
        await wait_for_end(receive)
        seen.append(time.time())

    monkeypatch.setattr(streaming, "_disconnected", noticing)
    options: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 300, "kv_budget": None}
    llm = AsyncLLM(
        **options,
        on_step=lambda stats: steps.append((time.time(), stats.last_step.num_running)),
    )
    with listening(llm) as (url, _):
        other = connection(url, {**ENDLESS, "stream": True})
        client = connection(url, {**ENDLESS, "n": 3, "stream": stream})
        wait_until(lambda: llm.stats().running == 4)
        closed = time.time()
        client.close()
        wait_until(lambda: llm.stats().running == 1)
        owned = llm.stats().blocks_owned
        assert 0 < owned < 140, "those of the other one"
        late = [at for at, running in steps if running == 4 and at > seen[0]]
        assert len(late) <= 2 and seen[0] - closed < 5
        other.close()
    llm.shutdown()


def test_a_client_that_goes_away_while_it_waits(engine: AsyncLLM, live: str) -> None:
    """Also requests of a batch, and those that have no token yet."""
    client = connection(live, {**ENDLESS, "prompt": [SUM] * 40, "stream": True})
    wait_until(lambda: engine.stats().waiting > 0)
    client.close()
    wait_until(lambda: is_idle(engine))


def test_a_client_that_never_reads(engine: AsyncLLM) -> None:
    body = {**ENDLESS, "stream": True, "n": 4, "logprobs": 20, "temperature": 1.0}
    steps = engine.stats().last_step.index
    with listening(engine, 4096, stall_timeout=0.3) as (url, _):
        client = connection(url, body, receive_buffer=4096)
        wait_until(lambda: engine.stats().running == 4)
        wait_until(lambda: is_idle(engine))
        assert engine.stats().last_step.index - steps < 1000, "it was not run to its end"
        assert httpx.get(f"{url}/health").status_code == 200
        client.close()


def test_a_slow_reader_gets_everything(engine: AsyncLLM, live: str) -> None:
    body = {**ENDLESS, "max_tokens": 60}
    whole = httpx.post(f"{live}/v1/completions", json=body).json()["choices"][0]["text"]
    client = connection(live, {**body, "stream": True})
    wait_until(lambda: engine.stats().running == 1)
    wait_until(lambda: is_idle(engine))
    data = b""
    client.settimeout(10)
    while not data.endswith(b"0\r\n\r\n"):
        data += client.recv(512)
        time.sleep(0.001)
    events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == whole


def test_a_body_that_grows_too_large(engine: AsyncLLM) -> None:
    with listening(engine, max_body_size=5000) as (url, _):

        def chunks() -> Any:
            for _ in range(20):
                yield b" " * 1000

        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{url}/v1/completions", content=chunks(), headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


def test_health_while_busy(engine: AsyncLLM, live: str) -> None:
    clients = [connection(live, {**ENDLESS, "stream": True, "n": 4}) for _ in range(3)]
    wait_until(lambda: engine.stats().running >= 12)
    waits = []
    with httpx.Client() as http:
        for _ in range(20):
            begun = time.perf_counter()
            assert http.get(f"{live}/health").status_code == 200
            waits.append(time.perf_counter() - begun)
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(engine))
    assert sorted(waits)[10] < 0.5, waits
