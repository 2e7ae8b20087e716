"""The Grafana board and Prometheus's configuration fit what /metrics tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "zipage.json").read_text())
#: What the boards in vLLM's repository ask for, of what an engine without speculative decoding,
#: LoRA and KV transfer has.
VLLM_BOARDS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped"),
    *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:cache_config_info"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:request_success_total", "vllm:prefix_cache_queries_total"),
    *("vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_inference_time_seconds_bucket"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_bucket"),
    *("vllm:request_params_n_bucket", "vllm:iteration_tokens_total_bucket"),
    "vllm:request_time_per_output_token_seconds_bucket",
)


@pytest.fixture(scope="module")
def families() -> list[Metric]:
    client = Client(ScriptedEngine(["."], tiny_tokenizer()))
    client.ok("/v1/completions", {"prompt": "Add"})
    return list(text_string_to_metric_families(client.get("/metrics").text))


@pytest.fixture(scope="module")
def metrics(families: list[Metric]) -> dict[str, set[str]]:
    """Names of samples, and the labels each of them has."""
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[str]:
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_the_board_asks_for_what_there_is(metrics: dict[str, set[str]]) -> None:
    asked = set()
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        found = re.findall(r"([a-z_]+:\w+)\{(.*?)\}", expression)
        assert found, expression
        for name, selector in found:
            asked.add(name)
            assert name in metrics, name
            labels = set(re.findall(r"(\w+)=~?\"", selector)) - {"instance"}
            labels |= set(re.findall(r"by \((\w+)\)", expression))
            assert labels <= metrics[name], (expression, metrics[name])
    assert {name for name in asked if name.startswith("zipage:")} >= {
        *("zipage:kv_blocks", "zipage:compressions_total", "zipage:evicted_tokens_total"),
        *("zipage:preemptions_total", "zipage:query_slots_in_use"),
    }
    for variable in BOARD["templating"]["list"]:
        for name in re.findall(r"[a-z]+:\w+", str(variable["query"])):
            assert name in metrics


def test_rates_are_of_what_only_grows(families: list[Metric]) -> None:
    kinds = {sample.name: family.type for family in families for sample in family.samples}
    selector = re.compile(r"(rate\()?\b([a-z]+:\w+)\{.*?\}(\[\$__rate_interval\])?")
    for expression in expressions():
        for rate, name, interval in selector.findall(expression):
            assert kinds[name] in ("gauge", "counter", "histogram")
            assert bool(rate) == bool(interval) == (kinds[name] != "gauge"), expression
            assert (kinds[name] == "histogram") == name.endswith(("_bucket", "_sum", "_count"))
            assert name.endswith("_bucket") == ("histogram_quantile" in expression)
            assert name.endswith("_bucket") == ("sum by (le) (" in expression)


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and (x, y) not in taken, panel["title"]
                taken.add((x, y))


def test_names_that_boards_of_vllm_ask_for(metrics: dict[str, set[str]]) -> None:
    for name in VLLM_BOARDS:
        assert name in metrics, name
        assert {"model_name", "engine"} <= metrics[name]
    assert metrics["http_requests_total"] == {"method", "handler", "status"}
    assert metrics["vllm:request_success_total"] == {"model_name", "engine", "finished_reason"}


def test_names_in_the_docs(metrics: dict[str, set[str]]) -> None:
    page = (DEPLOY.parent / "docs" / "serving.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:vllm|zipage):\w+|http_requests_total)(?:\{(.*?)\})?`", page)
    assert len(named) > 40
    told = {name.removesuffix("_bucket") for name in metrics}
    for name, labels in named:
        assert name in told, name
        assert set(filter(None, labels.split(","))) <= metrics.get(name, set()), name
    own = {name for name in told if name.startswith("zipage:")}
    own -= {f"zipage:compression_seconds_{part}" for part in ("count", "sum")}
    assert own <= {name for name, _ in named}, "every metric of ours is explained"


def test_prometheus_configuration() -> None:
    path = DEPLOY / "prometheus" / "prometheus.yml"
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"
