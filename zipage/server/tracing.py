"""OpenTelemetry: a span for every request of the engine, with the attributes of vLLM's spans, those
of the semantic conventions for generative AI, and the events of its KV cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zipage.errors import ConfigError
from zipage.outputs import RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from zipage.server.generation import Job


def otlp_exporter(endpoint: str) -> SpanExporter:
    """An exporter that sends spans to a collector by OTLP over HTTP.

    Raises:
        ConfigError: the packages it needs are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs {error.name}: pip install 'zipage[otel]'"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint)


class RequestTracer:
    """Makes the spans.

    Args:
        exporter: sends them, from its own thread.
        model_name: the model's name in the spans.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # as the variables OTEL_... say
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "zipage"}))
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("zipage.server")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def ended(
        self,
        headers: Mapping[str, str],
        job: Job,
        begun: int,
        output: RequestOutput | None,
        error: BaseException | None,
    ) -> None:
        """A request has ended.

        Args:
            headers: headers of the HTTP request; a ``traceparent`` sets the span's parent.
            job: the job that ended.
            begun: when it began, in nanoseconds since the epoch.
            output: its last output; None if there was none.
            error: the error it failed with.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=begun,
            attributes=self._attributes(job, output),
        )
        message = str(error) if error is not None else output.error if output is not None else None
        if message is not None:
            span.set_status(Status(StatusCode.ERROR, message))
            if error is not None:
                span.set_attribute("error.type", type(error).__name__)
        span.end(time.time_ns())

    def shutdown(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, job: Job, output: RequestOutput | None) -> dict[str, Any]:
        params = job.params
        found: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "zipage",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": job.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
            "gen_ai.usage.prompt_tokens": len(job.token_ids),
            "gen_ai.usage.input_tokens": len(job.token_ids),
            "zipage.kv_budget": params.kv_budget,
        }
        if output is not None:
            metrics, generated = output.metrics, output.usage.completion_tokens
            reasons = [completion.finish_reason or "abort" for completion in output.outputs]
            found |= {
                "gen_ai.response.id": output.request_id,
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.completion_tokens": generated,
                "gen_ai.usage.output_tokens": generated,
                "gen_ai.usage.num_sequences": len(output.outputs),
                "gen_ai.latency.time_in_queue": metrics.queue_time,
                "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
                "gen_ai.latency.e2e": metrics.e2e_time,
                "gen_ai.latency.time_in_model_prefill": metrics.prefill_time,
                "gen_ai.latency.time_in_model_decode": metrics.decode_time,
                "gen_ai.latency.time_in_model_inference": metrics.e2e_time - metrics.queue_time,
                "zipage.compressions": metrics.compressions,
                "zipage.evicted_tokens": metrics.evicted_tokens,
                "zipage.compression_time": metrics.compression_time,
                "zipage.peak_blocks": metrics.peak_blocks,
                "zipage.preemptions": metrics.preemptions,
                "zipage.cached_prompt_tokens": metrics.cached_prompt_tokens,
            }
        return {name: value for name, value in found.items() if value is not None}
