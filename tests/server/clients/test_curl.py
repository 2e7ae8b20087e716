"""curl talks to a server process: whole answers, streams, statuses, and going away."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.server.conftest import CHAT, SUM, Process, read_events, wait_until
from tests.server.test_chat import ANSWER, joined

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def curl(url: str, body: dict[str, Any] | None = None, *options: str) -> str:
    """Standard output of curl."""
    command = ["curl", "-sS", url, *options]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_chat(served: str) -> None:
    answer = json.loads(curl(f"{served}/v1/chat/completions", {"messages": CHAT}))
    assert answer["choices"][0]["message"]["content"] == ANSWER
    text = curl(f"{served}/v1/chat/completions", {"messages": CHAT, "stream": True}, "-N")
    events = read_events(text)
    assert events.pop() == "[DONE]" and joined(events)["content"] == ANSWER


def test_completions_from_a_file_and_in_chunks(served: str) -> None:
    body = {"prompt": SUM, "max_tokens": 6, "temperature": 0}
    whole = json.loads(curl(f"{served}/v1/completions", body))
    chunked = curl(f"{served}/v1/completions", body, "-H", "Transfer-Encoding: chunked")
    assert json.loads(chunked)["choices"] == whole["choices"]
    compressed = curl(f"{served}/v1/completions", body, "--compressed", "--http1.0")
    assert json.loads(compressed)["choices"] == whole["choices"]


def test_statuses(served: str) -> None:
    status = ["-o", "/dev/null", "-w", "%{http_code} %{content_type}"]
    assert curl(f"{served}/health", None, *status) == "200 application/json"
    assert curl(f"{served}/v1/completions", {"prompt": ""}, *status) == "400 application/json"
    assert curl(f"{served}/nothing", None, *status) == "404 application/json"
    assert curl(f"{served}/v1/completions", None, *status) == "405 application/json"
    assert curl(f"{served}/health", None, "-I", *status) == "200 application/json"
    assert curl(f"{served}/v1/completions", None, "-I", *status).startswith("405")


def test_going_away_ends_the_request(server: Process) -> None:
    body = {"prompt": SUM, "max_tokens": 1900, "ignore_eos": True, "n": 8, "stream": True}
    command = ["curl", "-sSN", f"{server.url}/v1/completions", "-d", json.dumps(body)]
    command += ["-H", "Content-Type: application/json", "-H", "X-Request-Id: going"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline()
        client.kill()

    def ends() -> list[str]:
        told = [line for line in server.lines if "request cmpl-going" in line]
        return [line for line in told if ": aborted after" in line]

    wait_until(lambda: len(ends()) == 8)
