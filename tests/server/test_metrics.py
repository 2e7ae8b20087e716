"""/metrics against traffic that is known exactly."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import SUM, Client, listening, wait_until
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from tests.server.test_lifecycle import connection
from zipage import AsyncLLM
from zipage.engine.process_client import EngineProcessClient
from zipage.engine.stats import EngineStats, FinishedCompletion, StepStats
from zipage.outputs import RequestMetrics
from zipage.server.metrics import ServerMetrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """Values by name and labels; the labels all of the engine's metrics have are checked."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "http_requests" not in sample.name:
                assert labels.pop("model_name") == "zipage-tiny" and labels.pop("engine") == "0"
            key = sample.name, tuple(sorted(labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(url: str) -> Samples:
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return read(answer.text)


def test_known_traffic(engine: AsyncLLM) -> None:
    compressed = {"kv_budget": 64, "return_kv_stats": True, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"prompt": SUM, "max_tokens": 5, "ignore_eos": True},
        {"prompt": SUM, "max_tokens": 200, **compressed},
        {"prompt": ["Add", "Start"], "max_tokens": 3, "n": 2, "ignore_eos": True},
        {"prompt": SUM, "max_tokens": 90, "stop": ["+"]},
        {"prompt": "", "max_tokens": 3},
    ]
    with listening(engine) as (url, _):
        before = scrape(url)
        answers = [httpx.post(f"{url}/v1/completions", json=body) for body in bodies]
        httpx.get(f"{url}/nowhere/at/all")
        # The last step is told of on the engine's thread, after its outputs.
        count = "vllm:e2e_request_latency_seconds_count"
        wait_until(lambda: scrape(url)[count, ()] - before[count, ()] == 7)
        after = scrape(url)
    assert [a.status_code for a in answers] == [200, 200, 200, 200, 400]

    def more(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    usages = [a.json()["usage"] for a in answers[:4]]
    generated = sum(usage["completion_tokens"] for usage in usages)
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert more("vllm:prompt_tokens_total") == prompts
    assert more("vllm:generation_tokens_total") == generated
    assert more("vllm:request_success_total", finished_reason="length") == 6
    assert more("vllm:request_success_total", finished_reason="stop") == 1
    assert more("vllm:request_success_total", finished_reason="abort") == 0
    assert more("vllm:request_generation_tokens_sum") == generated
    doubled = usages[2]["prompt_tokens"]
    assert more("vllm:request_prompt_tokens_sum") == prompts + doubled, "once for each answer"
    assert more("vllm:request_params_max_tokens_sum") == 5 + 200 + 4 * 3 + 90
    assert more("vllm:request_params_n_sum") == 1 + 1 + 4 * 2 + 1
    assert more("vllm:request_params_n_bucket", le="1.0") == 3
    assert more("vllm:time_to_first_token_seconds_count") == 7
    assert more("vllm:inter_token_latency_seconds_count") == generated - 7
    looked_up = more("vllm:prefix_cache_queries_total"), more("vllm:prefix_cache_hits_total")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert looked_up[1] >= cached > 0 and looked_up[0] >= prompts
    stats = answers[1].json()["choices"][0]["kv_stats"]
    assert more("zipage:compressions_total") == len(stats["compressions"]) > 1
    assert more("zipage:evicted_tokens_total") == stats["evicted_tokens"] > 0
    assert more("zipage:compression_seconds_count") == len(stats["compressions"])
    took = sum(record["seconds"] for record in stats["compressions"])
    assert more("zipage:compression_seconds_sum") == pytest.approx(took)
    assert more("vllm:iteration_tokens_total_count") <= generated
    posts = {"method": "POST", "path": "/v1/completions"}
    assert more("zipage:http_requests_total", **posts, status="200") == 4
    assert more("zipage:http_requests_total", **posts, status="400") == 1
    assert more("zipage:http_requests_total", method="GET", path="other", status="404") == 1
    handler = {"method": "POST", "handler": "/v1/completions"}
    assert more("http_requests_total", **handler, status="2xx") == 4
    blocks = [after["zipage:kv_blocks", (("state", s),)] for s in ("owned", "cached", "free")]
    assert sum(blocks) == 600 and blocks[0] == 0 < blocks[1]
    assert after["vllm:kv_cache_usage_perc", ()] == after["vllm:num_requests_running", ()] == 0
    assert after["zipage:query_slots", ()] == engine.config.resolved_query_slots
    assert after["zipage:engine_up", ()] == 1


def test_histograms_are_cumulative() -> None:
    metrics = ServerMetrics(ScriptedEngine([], tiny_tokenizer()), "zipage-tiny")
    values = [0.0005, 0.001, 0.002, 3000.0]
    times = RequestMetrics(queue_time=1.0, e2e_time=4.0, prefill_time=1.0, decode_time=2.0)
    ended = [
        FinishedCompletion("a", 0, "length", 7, 5, 9, times, 2),
        FinishedCompletion("b", 0, "abort", 7, 5, 9, times),
    ]
    step = StepStats(1, first_token_seconds=values, decode_tokens=3, finished=ended)
    metrics.observe(EngineStats(last_step=step))
    metrics.observe(EngineStats())
    found = read(metrics.exposition().decode())
    name = "vllm:time_to_first_token_seconds"
    assert found[f"{name}_sum", ()] == sum(values) and found[f"{name}_count", ()] == 4
    buckets = [
        (float(dict(labels)["le"]), value)
        for (sample, labels), value in found.items()
        if sample == f"{name}_bucket"
    ]
    assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
    for bound, value in buckets:
        assert value == sum(v <= bound for v in values), bound
    assert buckets[-1] == (math.inf, 4)
    per_token = found["vllm:request_time_per_output_token_seconds_sum", ()]
    assert per_token == 0.5 and found["vllm:request_inference_time_seconds_sum", ()] == 3.0
    assert found["vllm:e2e_request_latency_seconds_count", ()] == 1, "not of the aborted one"
    assert found["vllm:iteration_tokens_total_count", ()] == 1, "not of the idle step"


def test_every_application_has_its_own() -> None:
    scripted = ScriptedEngine(["Add", "."], tiny_tokenizer())
    one, other = Client(scripted), Client(scripted)
    for _ in range(2):
        one.ok("/v1/completions", {"prompt": "Add"})
    one.post("/metrics")
    name = "zipage:http_requests_total"
    posts = ("method", "POST"), ("path", "/v1/completions"), ("status", "200")
    found = read(one.get("/metrics").text)
    assert found[name, posts] == 2
    assert found[name, (("method", "POST"), ("path", "/metrics"), ("status", "405"))] == 1
    assert (name, posts) not in read(other.get("/metrics").text)


def test_paths_of_clients_are_no_labels() -> None:
    client = Client(ScriptedEngine(["."], tiny_tokenizer()), api_keys=["key"])
    for path in ("/v1/models/a", "/v1/b/c", "/d", "/metrics"):
        client.request("GET", path, headers={"Authorization": "Bearer key"})
    client.request("BREW", "/pot")
    client.get("/v1/models/a")
    text = client.get("/metrics").text
    paths = {
        dict(labels)["path"] for (name, labels) in read(text) if name.startswith("zipage:http")
    }
    assert paths == {"/v1/models/{model}", "/v1", "other", "/metrics"}
    assert 'method="other"' in text and "BREW" not in text


def test_names_do_not_depend_on_what_is_asked_for() -> None:
    """Prometheus 2.42's header, for one, which prefers OpenMetrics."""
    client = Client(ScriptedEngine(["."], tiny_tokenizer()))
    plain = read(client.get("/metrics").text)
    assert ("vllm:num_requests_running", ()) in plain
    accept = (
        "application/openmetrics-text;version=1.0.0,"
        "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )
    answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert {name for name, _ in read(answer.text)} >= {name for name, _ in plain}


def test_counters_go_on_after_a_restart() -> None:
    """And what a full queue refuses is counted."""
    client = EngineProcessClient(
        on_engine_death="restart", num_kv_blocks=100, max_num_seqs=1, max_queued_requests=1
    )
    try:
        with listening(client) as (url, _):
            assert scrape(url)["zipage:kv_blocks", (("state", "free"),)] == 100

            def complete() -> int:
                body = {"prompt": SUM, "max_tokens": 8, "ignore_eos": True}
                answer = httpx.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200
                return int(answer.json()["usage"]["completion_tokens"])

            tokens = complete()
            wait_until(lambda: scrape(url)["vllm:generation_tokens_total", ()] == tokens)
            before = scrape(url)
            os.kill(client.engine_pid, signal.SIGKILL)
            wait_until(lambda: scrape(url)["zipage:engine_up", ()] == 0)
            assert scrape(url)["vllm:generation_tokens_total", ()] == tokens
            wait_until(lambda: scrape(url)["zipage:engine_up", ()] == 1, 60)
            tokens += complete()
            wait_until(lambda: scrape(url)["vllm:generation_tokens_total", ()] == tokens)
            after = scrape(url)
            assert after["zipage:engine_restarts_total", ()] == 1
            for (name, labels), value in before.items():
                if name.endswith(("_total", "_count", "_sum", "_bucket")):
                    assert after[name, labels] >= value, (name, labels)
            assert after["zipage:queue_refusals_total", ()] == 0
            body = {"prompt": SUM, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            under_way = [connection(url, body) for _ in range(2)]
            wait_until(lambda: scrape(url)["vllm:num_requests_waiting", ()] == 1)
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 429
            for one in under_way:
                one.close()
            assert scrape(url)["zipage:queue_refusals_total", ()] == 1
    finally:
        client.shutdown()
