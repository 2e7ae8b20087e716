"""/metrics: the engine's and the server's numbers for Prometheus.

Names and labels are vLLM's where the meaning is the same, so that its Grafana dashboards work;
Zipage's own metrics start with ``zipage:``. Counters and gauges are read from `EngineStats` at
each scrape; histograms are filled step by step.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zipage.engine.client import EngineClient
from zipage.engine.stats import EngineStats, FinishedCompletion, StepStats

#: Also for clients that prefer OpenMetrics, as Prometheus does: in that format prometheus_client
#: (0.26, its issue 1177) replaces colons in names by underscores unless UTF-8 names are requested.
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COMPRESSION = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ITERATION = tuple(float(n) for n in (1, *(8 << k for k in range(12))))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

#: Name, documentation, field of `EngineStats`.
_GAUGES = (
    ("vllm:num_requests_running", "Requests that own KV blocks.", "running"),
    ("vllm:num_requests_waiting", "Requests not admitted yet, or preempted.", "waiting"),
    ("vllm:num_requests_swapped", "Requests whose cache lies in host memory.", "swapped"),
    ("vllm:kv_cache_usage_perc", "Share of owned KV blocks, 1 for all.", "kv_cache_usage"),
    ("vllm:gpu_cache_usage_perc", "The same under its older name.", "kv_cache_usage"),
    ("zipage:requests_compressing", "Requests whose compression is in flight.", "compressing"),
    ("zipage:query_slots_in_use", "Query slots that requests hold.", "query_slots_in_use"),
    ("zipage:query_slots", "Query slots of the pool.", "query_slots_total"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    ("vllm:num_preemptions", "Preemptions of all kinds.", "preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_cache_hits"),
    ("vllm:gpu_prefix_cache_queries", "The same under its older name.", "prefix_cache_queries"),
    ("vllm:gpu_prefix_cache_hits", "The same under its older name.", "prefix_cache_hits"),
    ("zipage:compressions", "Finished compressions.", "compressions"),
    ("zipage:evicted_tokens", "Tokens evicted from each layer and KV head.", "evicted_tokens"),
    ("zipage:prefill_tokens", "Prompt tokens computed or recomputed.", "prefill_tokens"),
    ("zipage:steps", "Model steps.", "steps"),
    ("zipage:step_seconds", "Seconds in engine steps.", "step_seconds"),
    ("zipage:forward_seconds", "Seconds in the model and in sampling.", "forward_seconds"),
    ("zipage:stalls_resolved", "Preemptions because nothing could run.", "stalls_resolved"),
    ("zipage:requests_submitted", "Accepted requests.", "requests_submitted"),
    ("zipage:requests_refused", "Requests refused as illegal.", "requests_refused"),
    ("zipage:engine_restarts", "Engines started to replace dead ones.", "engine_restarts"),
)
#: Name, documentation, upper bounds of the buckets; None for token counts.
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float] | None], ...] = (
    ("vllm:time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN),
    ("vllm:inter_token_latency_seconds", "From one token to the next.", _PER_TOKEN),
    ("vllm:time_per_output_token_seconds", "The same under its older name.", _PER_TOKEN),
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", _ITERATION),
    ("zipage:compression_seconds", "Duration of a compression.", _COMPRESSION),
    ("vllm:e2e_request_latency_seconds", "From submission to the end.", _REQUEST),
    ("vllm:request_queue_time_seconds", "From submission to the first step.", _REQUEST),
    ("vllm:request_prefill_time_seconds", "From there to the first token.", _REQUEST),
    ("vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST),
    ("vllm:request_inference_time_seconds", "From the first step to the end.", _REQUEST),
    ("vllm:request_time_per_output_token_seconds", "Mean of a request.", _PER_TOKEN),
    ("vllm:request_prompt_tokens", "Tokens of the prompt.", None),
    ("vllm:request_generation_tokens", "Tokens of the answer.", None),
    ("vllm:request_max_num_generation_tokens", "Tokens of the answer.", None),
    ("vllm:request_params_max_tokens", "Most tokens the answer could have.", None),
    ("vllm:request_params_n", "Answers requested.", _CHOICES),
)


class Distribution:
    """Counts of values by bucket. Not thread-safe.

    Args:
        bounds: upper bounds of the buckets, ascending; a last bucket takes larger values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count values."""
        for value in values:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Counts up to each bound, as Prometheus writes them, and the sum of all values."""
        buckets, count = [], 0
        for bound, more in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            count += more
            buckets.append((bound, float(count)))
        return buckets, self._sum


class ServerMetrics(Collector):
    """The metrics of one application.

    Args:
        engine: whose statistics are reported; `observe` must be called after each of its steps.
        model_name: label of all metrics.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        tokens = _one_two_five(engine.max_model_len)
        self._distributions = {
            name: Distribution(tokens if bounds is None else bounds)
            for name, _, bounds in _HISTOGRAMS
        }
        #: Number of responses by method, path and status.
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # ------------------------------------------------------------------ what happens

    def observe(self, stats: EngineStats) -> None:
        """Record the last step of `stats`. From any thread."""
        with self._lock:
            for name, values in _of_step(stats.last_step).items():
                self._distributions[name].observe(values)
            for completion in stats.last_step.finished:
                # Aborted and failed ones were cut short.
                if completion.finish_reason in ("stop", "length"):
                    for name, value in _of_completion(completion).items():
                        self._distributions[name].observe((value,))

    def answered(self, method: str, path: str, status: int) -> None:
        """Count a response; `path` must be one of a bounded set."""
        with self._lock:
            self._answers[method if method in _METHODS else "other", path, status] += 1

    # ------------------------------------------------------------------ what is reported

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format, `EXPOSITION_TYPE`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        with self._lock:
            found = {name: d.cumulative() for name, d in self._distributions.items()}
            answers = dict(self._answers)
        for name, text, _ in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=_LABELS)
            buckets, total = found[name]
            histogram.add_metric((self._model_name, "0"), buckets, total)
            yield histogram
        yield from _answer_counters(answers)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            yield self._labelled(
                GaugeMetricFamily(name, text, labels=_LABELS), getattr(stats, field)
            )
        up = GaugeMetricFamily("zipage:engine_up", "1 while requests are accepted.", labels=_LABELS)
        yield self._labelled(up, self._engine.is_running)
        labels: tuple[str, ...] = (*_LABELS, "state")
        blocks = GaugeMetricFamily("zipage:kv_blocks", "Blocks of the KV pool.", labels=labels)
        for state in ("owned", "cached", "free"):
            self._labelled(blocks, getattr(stats, f"blocks_{state}"), state)
        yield blocks
        config = self._engine.config
        described = {
            "block_size": config.block_size,
            "num_gpu_blocks": stats.blocks_total,
            "enable_prefix_caching": config.enable_prefix_caching,
            "kv_budget": config.kv_budget,
            "compression": config.compression,
        }
        text, labels = "Options of the KV cache.", (*_LABELS, *described)
        info = GaugeMetricFamily("vllm:cache_config_info", text, labels=labels)
        yield self._labelled(info, 1, *map(str, described.values()))

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        fields = [(name, text, getattr(stats, field)) for name, text, field in _COUNTERS]
        refused = self._engine.queue_refusals
        fields.append(("zipage:queue_refusals", "Requests refused: queue was full.", refused))
        for name, text, value in fields:
            yield self._labelled(CounterMetricFamily(name, text, labels=_LABELS), value)
        labels = (*_LABELS, "kind")
        kinds = CounterMetricFamily("zipage:preemptions", "Preemptions by kind.", labels=labels)
        for kind in ("recompute", "swap"):
            self._labelled(kinds, getattr(stats, f"preemptions_{kind}"), kind)
        yield kinds
        labels = (*_LABELS, "finished_reason")
        ended = CounterMetricFamily("vllm:request_success", "Answers that ended.", labels=labels)
        for reason in ("stop", "length", "abort", "error"):
            self._labelled(ended, getattr(stats, f"completions_{reason}"), reason)
        yield ended

    def _labelled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float, *labels: str
    ) -> Metric:
        family.add_metric((self._model_name, "0", *labels), float(value))
        return family


def _of_step(step: StepStats) -> dict[str, Sequence[float]]:
    return {
        "vllm:time_to_first_token_seconds": step.first_token_seconds,
        "vllm:inter_token_latency_seconds": step.inter_token_seconds,
        "vllm:time_per_output_token_seconds": step.inter_token_seconds,
        "vllm:iteration_tokens_total": (step.num_tokens,) if step.num_tokens else (),
        "zipage:compression_seconds": step.compression_seconds,
    }


def _of_completion(completion: FinishedCompletion) -> dict[str, float]:
    metrics, generated = completion.metrics, completion.generated_tokens
    found: dict[str, float] = {
        "vllm:e2e_request_latency_seconds": metrics.e2e_time,
        "vllm:request_queue_time_seconds": metrics.queue_time,
        "vllm:request_prefill_time_seconds": metrics.prefill_time or 0.0,
        "vllm:request_decode_time_seconds": metrics.decode_time,
        "vllm:request_inference_time_seconds": metrics.e2e_time - metrics.queue_time,
        "vllm:request_prompt_tokens": completion.prompt_tokens,
        "vllm:request_generation_tokens": generated,
        "vllm:request_max_num_generation_tokens": generated,
        "vllm:request_params_max_tokens": completion.max_tokens,
        "vllm:request_params_n": completion.n,
    }
    if generated > 1:
        mean = metrics.decode_time / (generated - 1)
        found["vllm:request_time_per_output_token_seconds"] = mean
    return found


def _answer_counters(answers: Mapping[tuple[str, str, int], int]) -> Iterator[Metric]:
    """HTTP responses, also under the name and labels that vLLM's dashboards use."""
    family = CounterMetricFamily(
        "zipage:http_requests", "HTTP requests answered.", labels=("method", "path", "status")
    )
    grouped: Counter[tuple[str, str, str]] = Counter()
    for (method, path, status), count in answers.items():
        family.add_metric((method, path, str(status)), count)
        grouped[method, path, f"{status // 100}xx"] += count
    yield family
    family = CounterMetricFamily(
        "http_requests", "HTTP requests answered.", labels=("method", "handler", "status")
    )
    for labels, count in grouped.items():
        family.add_metric(labels, count)
    yield family


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [float(power * digit) for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return bounds
