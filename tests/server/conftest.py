"""Servers in this process, without and with a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from zipage import AsyncLLM
from zipage.engine.client import EngineClient
from zipage.server.app import create_app
from zipage.server.settings import ServerSettings

SUM = "Add these numbers.\n#1 74\n#2 79\nWhat is the sum (#1-#2)? No checks."
CHAT = [{"role": "user", "content": SUM}]


class Client:
    """Talks to an application without a socket."""

    def __init__(self, engine: EngineClient, **settings: Any) -> None:
        self.app = create_app(engine, ServerSettings(**settings), owns_engine=False)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://zipage") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/json", **options.pop("headers", {})}
            return self.request("POST", path, content=body, headers=headers, **options)
        return self.request("POST", path, json=body, **options)

    def ok(self, path: str, body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a stream, which must end with [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = read_events(answer.text)
        assert found.pop() == "[DONE]"
        return found


def read_events(text: str) -> list[Any]:
    """Data of the events of a stream."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        data = block.rpartition("data: ")[2]
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """What the events of a completion add up to, by choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@contextlib.contextmanager
def listening(
    engine: EngineClient, send_buffer: int | None = None, **settings: Any
) -> Iterator[tuple[str, Any]]:
    """A server with a socket, perhaps with a small buffer; its URL and application."""
    app = create_app(engine, ServerSettings(**settings), owns_engine=False)
    config = uvicorn.Config(app, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", settings.get("port", 0))) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `run_server` does
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        arguments = {"sockets": [listener]}
        thread = threading.Thread(target=server.run, kwargs=arguments, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
        app.state.serving.draining = server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "zipage", "serve", *arguments]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.lines: list[str] = []
        self.listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.listens.wait(60) and self.url, self.lines

    url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.match(r"Zipage serves .* at (\S+) ", line)
            if found:
                self.url = found.group(1)
                self.listens.set()
        self.listens.set()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    running: list[Process] = []
    yield running
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    """zipage-tiny with small blocks, full KV unless a request says otherwise."""
    llm = AsyncLLM(
        block_size=16, num_kv_blocks=600, kv_budget=None, max_model_len=2048, max_num_seqs=16
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def client(engine: AsyncLLM) -> Client:
    return Client(engine)


@pytest.fixture(scope="session")
def live(engine: AsyncLLM) -> Iterator[str]:
    """URL of a server with a socket."""
    with listening(engine) as (url, _):
        yield url
