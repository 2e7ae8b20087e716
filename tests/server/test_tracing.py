"""Spans of requests, in memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import SUM, Client
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage import AsyncLLM, ConfigError, SamplingParams
from zipage.outputs import RequestMetrics, RequestOutput
from zipage.server.generation import Job
from zipage.server.settings import ServerSettings
from zipage.server.tracing import RequestTracer

pytest.importorskip("opentelemetry.sdk")

ENDPOINT = "http://127.0.0.1:1/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would be sent to the collector."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    monkeypatch.setattr("zipage.server.serving.otlp_exporter", lambda endpoint: found)
    return found


def spans_of(client: Client, exporter: Any) -> list[Any]:
    client.app.state.serving.tracer.shutdown()
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_of_a_request(engine: AsyncLLM, exporter: Any, stream: bool) -> None:
    client = Client(engine, otlp_traces_endpoint=ENDPOINT)
    body = {"prompt": SUM, "max_tokens": 120, "kv_budget": 64, "ignore_eos": True, "n": 2}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    answer = client.post("/v1/completions", {**body, "stream": stream}, headers=headers)
    assert answer.status_code == 200
    (span,) = spans_of(client, exporter)
    assert span.name == "llm_request" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.status.status_code.name == "UNSET"
    assert span.resource.attributes["service.name"] == "zipage"
    found = dict(span.attributes)
    assert found["gen_ai.request.id"].startswith("cmpl-mine")
    assert found["gen_ai.request.model"] == "zipage-tiny"
    assert found["gen_ai.usage.output_tokens"] == found["gen_ai.usage.completion_tokens"] == 240
    assert found["gen_ai.usage.input_tokens"] == len(tiny_tokenizer().encode(SUM))
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.request.max_tokens"] == 120 and found["gen_ai.request.n"] == 2
    assert found["zipage.kv_budget"] == 64 and found["zipage.compressions"] > 1
    assert found["zipage.evicted_tokens"] > 0
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    seconds = (span.end_time - span.start_time) / 1e9
    assert found["gen_ai.latency.e2e"] <= seconds + 0.05 < found["gen_ai.latency.e2e"] + 5


def test_a_swap_is_one_preemption(exporter: Any) -> None:
    metrics = RequestMetrics(preemptions=3, swaps=2)
    output = RequestOutput("a", None, [1], [], finished=True, metrics=metrics)
    tracer = RequestTracer(exporter, "tiny")
    tracer.ended({}, Job("a", None, [1], SamplingParams()), 0, output, None)
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["zipage.preemptions"] == 3


def test_prompts_have_spans_of_their_own(exporter: Any) -> None:
    client = Client(ScriptedEngine(["Add", "."], tiny_tokenizer()), otlp_traces_endpoint=ENDPOINT)
    client.ok("/v1/completions", {"prompt": ["Add", "Start"]})
    client.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": "Add"}]})
    spans = spans_of(client, exporter)
    assert len(spans) == 3 and all(span.parent is None for span in spans)
    assert len({span.attributes["gen_ai.request.id"] for span in spans}) == 3


def test_a_failure_is_told(exporter: Any) -> None:
    engine = ScriptedEngine(["Add", ValueError("broken")], tiny_tokenizer())
    client = Client(engine, otlp_traces_endpoint=ENDPOINT)
    assert client.post("/v1/completions", {"prompt": "Add"}).status_code == 500
    (span,) = spans_of(client, exporter)
    assert span.status.status_code.name == "ERROR" and span.status.description == "broken"
    assert span.attributes["error.type"] == "ValueError"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_no_spans_unless_asked_for(exporter: Any) -> None:
    client = Client(ScriptedEngine(["Add"], tiny_tokenizer()))
    client.ok("/v1/completions", {"prompt": "Add"})
    assert client.app.state.serving.tracer is None and not exporter.get_finished_spans()


def test_the_endpoint_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='localhost:4318' must be a URL"):
        ServerSettings(otlp_traces_endpoint="localhost:4318")
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'zipage\[otel\]'"):
        Client(ScriptedEngine([], tiny_tokenizer()), otlp_traces_endpoint=ENDPOINT)
