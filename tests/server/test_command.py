"""`zipage serve`: options, the config file, the end."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cli.invoke import invoke
from tests.server.conftest import Process, wait_until
from zipage import AsyncLLM
from zipage.errors import ConfigError
from zipage.server import run
from zipage.server.run import _listening, check_listening
from zipage.server.settings import ServerSettings

SMALL = ["--num-kv-blocks", "100", "--block-size", "16", "--kv-budget", "none"]


def test_running_requests_finish_after_sigterm(processes: list[Process], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "port: 0\nserved-model-name: [one, two]\nkv_budget: null\nblock_size: 16\n"
        "num_kv_blocks: 100\nmax_model_len: 700\n"
    )
    server = Process("--config", str(config), "--max-model-len", "800", ZIPAGE_API_KEYS="k1 k2")
    processes.append(server)
    headers = {"Authorization": "Bearer k2"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two"]
        assert cards[0]["max_model_len"] == 800, "the flag wins over the file"
        body = {"prompt": "Add", "max_tokens": 700, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            # It goes on listening meanwhile.
            for path in ("/health", "/v1/completions"):
                method = "GET" if path == "/health" else "POST"
                refused = httpx.request(method, server.url + path, json=body, headers=headers)
                assert refused.status_code == 503 and refused.headers["Retry-After"]
                assert "shutting down" in refused.json()["error"]["message"]
            last = [line for line in lines if line][-1]
        assert last == "data: [DONE]"
    assert server.process.wait(15) == 0
    server._reader.join(10)
    access = [line for line in server.lines if "zipage.server.access" in line]
    assert any("GET /v1/models 200" in line for line in access), server.lines
    ends = [line for line in server.lines if "zipage.server.run" in line]
    assert "draining 1 requests, for at most 30 s" in ends[0] and "stopped" in ends[1]


def test_more_ctrl_c_end_the_drain(processes: list[Process]) -> None:
    server = Process(*SMALL, "--port", "0", "--max-model-len", "1500")
    processes.append(server)
    body = {"prompt": "Add", "max_tokens": 1400, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port)) as unfinished:
            head = "POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Type: application/json\r\n"
            unfinished.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: any("draining 2 requests" in line for line in server.lines))
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
            server.process.send_signal(signal.SIGINT)
            code = server.process.wait(15)
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert code == 0
    server._reader.join(10)
    assert any("interrupted again: 2 requests are aborted" in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_an_idle_server_says_that_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    servers: list[Any] = []
    listens = threading.Event()

    class Server(run._Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            servers.append(self)

    engine = AsyncLLM(num_kv_blocks=20, block_size=16, kv_budget=None, max_model_len=128)
    settings = ServerSettings(port=0, drain_timeout=2.5)
    codes: list[int] = []

    def serve() -> None:
        codes.append(run.run_server(engine, settings, lambda line: listens.set()))

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "zipage.server.run"]

    with (
        mock.patch.object(run, "_Server", Server),
        caplog.at_level(logging.INFO, logger="zipage.server.run"),
    ):
        thread = threading.Thread(target=serve)
        thread.start()
        assert listens.wait(30)
        assert not told()
        servers[0].handle_exit(signal.SIGTERM, None)
        thread.join(30)
    gc.unfreeze()
    assert codes == [0]
    assert told() == ["draining 0 requests, for at most 2.5 s", "stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_uvicorn_handles_them(number: signal.Signals) -> None:
    lost: list[bool] = []

    class Server(run._Server):
        def run(self, sockets: Any = None) -> None:
            signal.raise_signal(number)
            super().run(sockets)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            lost.append(not self.should_exit)
            self.should_exit = True

    before = signal.getsignal(number)
    engine = AsyncLLM(num_kv_blocks=20, block_size=16, kv_budget=None, max_model_len=128)
    with mock.patch.object(run, "_Server", Server):
        assert run.run_server(engine, ServerSettings(port=0), lambda line: None) == 0
    gc.unfreeze()
    assert lost == [False]
    assert signal.getsignal(number) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_it_serves_though_nothing_can_be_logged(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    command = [sys.executable, "-m", "zipage", "serve", *SMALL, "--uds", path]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stderr=full, stdout=full)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://z") as http:

            def serves() -> bool:
                assert process.poll() is None, "it ended"
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/health").status_code == 200
                return False

            wait_until(serves, 60)
            body = {"prompt": "Add", "max_tokens": 3}
            assert http.post("/v1/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_the_drain_has_a_deadline_and_unix_sockets(processes: list[Process]) -> None:
    path = f"/tmp/zipage-test-{os.getpid()}.sock"
    server = Process(*SMALL, "--uds", path, "--drain-timeout", "1", "--max-model-len", "1500")
    processes.append(server)
    transport = httpx.HTTPTransport(uds=path)
    body = {"prompt": "Add", "max_tokens": 1400, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.Client(transport=transport, base_url="http://zipage") as http:
        assert http.get("/health").json() == {"status": "ok"}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.process.wait(15) == 0
    server._reader.join(10)
    assert time.monotonic() - begun < 15
    assert not any("Traceback" in line for line in server.lines), server.lines
    assert not os.path.exists(path)


@pytest.mark.slow
def test_the_server_ends_with_its_engine(processes: list[Process]) -> None:
    server = Process(*SMALL, "--port", "0", "--max-model-len", "1500")
    processes.append(server)
    number = server.process.pid
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    body = {"prompt": "Add", "max_tokens": 1400, "ignore_eos": True, "stream": True, "n": 8}
    with (
        httpx.stream("GET", f"{server.url}/dashboard/events") as page,  # which delays nothing
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        next(page.iter_lines())
        lines = answer.iter_lines()
        next(lines)
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        last = [line for line in lines if line][-1]
        assert "service_unavailable_error" in last
        assert server.process.wait(15) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_https(processes: list[Process], tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--port", "0"]
    server = Process(*SMALL, *flags)
    processes.append(server)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(f"{server.url}/health", verify=context).status_code == 200
    assert server.stop() == 0


def fails(*arguments: str) -> str:
    result = invoke("serve", *arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def test_writes_do_not_wait_for_each_other() -> None:
    with (
        _listening(ServerSettings(port=0)) as (listener, _),
        socket.create_connection(listener.getsockname()) as _,
    ):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_mistakes_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    assert "port" in fails("--port", "70000")
    assert "reasoning_parser" in fails("--reasoning-parser", "tank")
    assert "drain_timeout" in fails("--drain-timeout", "-1")
    assert "request_timeout=0.0 must be" in fails("--request-timeout", "0")
    assert "ssl_certfile" in fails("--ssl-keyfile", __file__)
    assert "is not a file" in fails("--chat-template", str(tmp_path / "none"))
    assert "block_size" in fails("--block-size", "7")
    assert "max_body_size" in fails("--max-body-size", "much")
    assert "kv_budget=2048 must be at most max_kv_budget=1024" in fails("--max-kv-budget", "1024")
    config = tmp_path / "config.yaml"
    config.write_text("prot: 1\n")
    assert "did you mean port" in fails("--config", str(config))
    config.write_text("- port\n")
    assert "mapping" in fails("--config", str(config))
    config.write_text("port: [\n")
    assert "cannot be read" in fails("--config", str(config))
    config.write_text("port: many\n")
    assert "--port" in fails("--config", str(config))


@pytest.mark.parametrize("keys", ["", " ", "\n"])
def test_an_empty_key_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    """A compose file leaves it so where the variable it stands for is not set."""
    monkeypatch.setenv("ZIPAGE_API_KEYS", keys)
    assert "ZIPAGE_API_KEYS is empty" in fails()


def test_where_it_cannot_listen_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = mock.Mock()
    monkeypatch.setattr("zipage.engine.process_client.EngineProcessClient", loaded)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in fails("--port", str(taken.getsockname()[1]))
    assert "x.sock" in fails("--uds", str(tmp_path / "nowhere" / "x.sock"))
    assert "host" in fails("--host", "")
    assert "ssl_certfile" in fails("--port", "0", "--ssl-certfile", __file__)
    config = tmp_path / "config.yaml"
    config.write_text("port: 0\napi-keys: {key: secret}\n")
    assert "mapping" in fails("--config", str(config))
    assert not loaded.called


def test_ctrl_c_ends_the_start_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(*arguments: Any, **options: Any) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    # The first ones import numpy and torch, where a KeyboardInterrupt may be swallowed.
    monkeypatch.setattr("zipage.config.EngineConfig.from_options", note)
    monkeypatch.setattr("zipage.server.run.check_listening", note)
    monkeypatch.setattr("zipage.engine.process_client.EngineProcessClient", note)
    monkeypatch.setattr("zipage.server.run.run_server", note)
    before = signal.getsignal(signal.SIGINT)
    assert invoke("serve").exit_code == 0
    assert seen == [signal.SIG_DFL] * 3 + [before]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:right"]
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    usual = {"port": 0, "ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    check_listening(ServerSettings(**usual, ssl_keyfile_password="right"))
    for more, word in [
        ({"ssl_keyfile_password": "wrong"}, "ssl_keyfile_password"),
        ({}, "ssl_keyfile_password"),  # and nobody is asked for it
        ({"ssl_keyfile_password": "right", "ssl_keyfile": None}, "ssl_keyfile"),
        ({"ssl_keyfile_password": "right", "ssl_ca_certs": __file__}, "ssl_ca_certs"),
    ]:
        with pytest.raises(ConfigError, match=word):
            check_listening(ServerSettings(**{**usual, **more}))


def test_the_config_file_equals_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("zipage.server.run.check_listening", lambda settings: None)
    monkeypatch.setattr(
        "zipage.server.run.run_server", lambda llm, settings, say: seen.append((llm, settings))
    )
    monkeypatch.setattr(
        "zipage.engine.process_client.EngineProcessClient",
        lambda model, **options: (model, options),
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: some/model\nkv-budget: null\ncompression: snapkv\npolicy_option: {pooling: 3}\n"
        "enable_prefix_caching: false\napi_keys: [a, b]\nmax_body_size: 1MiB\n"
        "request_timeout: 5\nlog_prompts: true\nlog_level: error\n"
    )
    flags = [
        *("some/model", "--kv-budget", "none", "--compression", "snapkv"),
        *("--policy-option", "pooling=3", "--no-enable-prefix-caching", "--api-key", "a"),
        *("--api-key", "b", "--max-body-size", "1MiB", "--request-timeout", "5"),
        *("--log-prompts", "--log-level", "error"),
    ]
    for arguments in (["--config", str(config)], flags):
        result = invoke("serve", *arguments)
        assert result.exit_code == 0, result.output
    monkeypatch.setenv("ZIPAGE_CONFIG", str(config))
    monkeypatch.setenv("ZIPAGE_PORT", "1234")
    assert invoke("serve", "other").exit_code == 0
    assert seen[0] == seen[1]
    ((model, options), settings) = seen[0]
    assert model == "some/model" and options["kv_budget"] is None
    assert options["policy_options"] == {"pooling": 3} and settings.api_keys == ["a", "b"]
    assert settings.request_timeout == 5.0 and settings.log_prompts is True
    ((model, options), settings) = seen[2]
    assert model == "other" and settings.port == 1234 and options["compression"] == "snapkv"


def test_help_is_grouped() -> None:
    text = invoke("serve", "--help").stdout
    for panel in ("Server", "Chat", "Limits", "Model", "KV cache", "Compression", "Logging"):
        assert f"─ {panel} ─" in text


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "zipage.server.run", raising=False)
    assert "pip install 'zipage[serve]'" in fails()
