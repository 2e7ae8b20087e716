"""`zipage top` against a server."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from tests.cli.invoke import invoke
from tests.server.conftest import SUM, Client, listening, wait_until
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage import AsyncLLM
from zipage.cli.top import History, Reading, percentile, read_metrics, sparkline


def test_once(engine: AsyncLLM, live: str) -> None:
    body = {"prompt": SUM, "max_tokens": 100, "kv_budget": 64, "ignore_eos": True}
    assert httpx.post(f"{live}/v1/completions", json=body).status_code == 200
    for url in (live, f"{live}/metrics", f"{live}/v1/", live.removeprefix("http://")):
        result = invoke("top", "--once", "--url", url)
        assert result.exit_code == 0, result.output
    stats = engine.stats()
    words = " ".join(result.output.split())
    assert "zipage-tiny at http://127.0.0.1" in words
    assert f"{stats.compressions:,} in all" in words and f"{stats.evicted_tokens:,} in all" in words
    assert f"{stats.blocks_owned} owned, {stats.blocks_cached} cached" in words
    assert f"0 of {engine.config.resolved_query_slots} in use" in words
    assert "ms median" in words


def test_no_server() -> None:
    result = invoke("top", "--once", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2 and "no metrics from http://127.0.0.1:1/metrics" in result.output
    assert "Traceback" not in result.output


def test_not_a_server_of_ours(live: str) -> None:
    result = invoke("top", "--once", "--url", f"{live}/nowhere")
    assert result.exit_code == 2 and "404" in result.output


def test_it_goes_on_after_a_restart() -> None:
    """Without a terminal every reading is printed, and a server that is away is waited for."""
    printed: list[str] = []
    engine = ScriptedEngine(["Add", "."], tiny_tokenizer())
    with listening(engine) as (url, _):
        port = int(url.rpartition(":")[2])
        command = [sys.executable, "-c", "from zipage.cli import app; app()"]
        command += ["top", "--url", url, "--interval", "0.1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
        reader.start()
        wait_until(lambda: any("KV pool" in line for line in printed), 30)
    wait_until(lambda: any("trying again" in line for line in printed))
    count = len(printed)
    with listening(engine, port=port) as _:
        wait_until(lambda: any("running" in line for line in printed[count:]))
        process.terminate()
        process.wait(10)
        reader.join(10)


def test_percentiles() -> None:
    now = {0.1: 10.0, 0.2: 30.0, math.inf: 40.0}
    assert percentile(0.5, now, {}) == pytest.approx(0.15)
    assert percentile(0.5, now, {0.1: 10.0, 0.2: 10.0, math.inf: 10.0}) == pytest.approx(0.175)
    assert percentile(0.99, now, {}) == 0.2, "there is no upper bound"
    assert percentile(0.5, now, now) is None and percentile(0.5, {}, {}) is None
    assert sparkline([0, 4, 8]) == "▁▄█" and sparkline([0.0]) == "▁"


def test_rates_and_restarts() -> None:
    def reading(time: float, tokens: float) -> Reading:
        return Reading(time, {"vllm:generation_tokens_total": tokens})

    history, name = History(), "vllm:generation_tokens_total"
    history.add(reading(0, 100))
    assert history.rate(name) is None
    history.add(reading(2, 140))
    assert history.rate(name) == 20
    history.add(reading(3, 5))
    assert history.rate(name) is None, "another server: nothing to compare with"
    for second in range(4, 200):
        history.add(reading(second, 5 * second))
    assert history.rate(name) == 5 and len(history.readings) < 65


def test_reading() -> None:
    text = Client(ScriptedEngine(["."], tiny_tokenizer())).get("/metrics").text
    reading: Any = read_metrics(text, 1.0)
    assert reading.model_name == "zipage-tiny"
    assert reading.values["zipage:kv_blocks/owned"] == 0 == reading.get("nothing")
    assert max(reading.buckets["vllm:time_to_first_token_seconds"]) == math.inf
