"""`zipage top`: what a running server is doing, in a terminal."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zipage.errors import ConfigError

#: Seconds over which percentiles and shares are taken.
_WINDOW = 60.0
_TIMEOUT = 5.0
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Reading:
    """The metrics of a server at one moment.

    Attributes:
        time: the moment on `time.monotonic`'s clock, in seconds.
        values: by metric name, or by name and a label's value; summed over other labels.
        buckets: upper bounds and cumulative counts of histograms, by name.
        model_name: the server's name for its model.
    """

    time: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    model_name: str = ""

    def get(self, name: str) -> float:
        """The value of a metric, 0 if there is none."""
        return self.values.get(name, 0.0)


def read_metrics(text: str, now: float) -> Reading:
    """Parse a response of /metrics.

    Raises:
        ValueError: `text` is not in Prometheus's format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    reading = Reading(now)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name, dict(sample.labels)
            reading.model_name = labels.pop("model_name", reading.model_name)
            labels.pop("engine", None)
            if name.endswith("_bucket"):
                counts = reading.buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
                continue
            for key in [name, *(f"{name}/{value}" for value in labels.values())]:
                reading.values[key] = reading.values.get(key, 0.0) + sample.value
    return reading


def percentile(share: float, now: dict[float, float], before: dict[float, float]) -> float | None:
    """The value that `share` of the observations in between do not exceed, interpolated linearly in
    its bucket as Prometheus does; None if there were none.

    Args:
        share: from 0 to 1.
        now: cumulative counts by upper bound.
        before: the same, earlier.
    """
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted, lower, seen = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > seen:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - seen) / (count - seen)
        lower, seen = bound, max(seen, count)
    return lower


class History:
    """The readings of the last minute; starts over when the server was restarted."""

    def __init__(self) -> None:
        self.readings: collections.deque[Reading] = collections.deque()
        self.rates: collections.deque[float] = collections.deque(maxlen=60)

    def add(self, reading: Reading) -> None:
        """Take the newest reading."""
        name = "vllm:generation_tokens_total"
        if self.readings and reading.get(name) < self.readings[-1].get(name):
            self.readings.clear()
        if self.readings:
            last = self.readings[-1]
            seconds = max(reading.time - last.time, 1e-6)
            self.rates.append((reading.get(name) - last.get(name)) / seconds)
        self.readings.append(reading)
        while len(self.readings) > 2 and self.readings[1].time <= reading.time - _WINDOW:
            self.readings.popleft()

    def rate(self, name: str, seconds: float = 3.0) -> float | None:
        """Growth of a counter per second over the last few seconds; None after one reading."""
        last = self.readings[-1]
        first = next((r for r in self.readings if r.time >= last.time - seconds), last)
        if first is last:
            first = self.readings[max(0, len(self.readings) - 2)]
        if first is last:
            return None
        return (last.get(name) - first.get(name)) / max(last.time - first.time, 1e-6)

    def percentile(self, name: str, share: float) -> float | None:
        """A percentile of the last minute, or since the server's start after one reading."""
        first, last = self.readings[0], self.readings[-1]
        before = {} if first is last else first.buckets.get(name, {})
        return percentile(share, last.buckets.get(name, {}), before)

    def share(self, part: str, whole: str) -> float | None:
        """Growth of one counter divided by that of another, over the last minute."""
        first, last = self.readings[0], self.readings[-1]
        base = Reading(0.0) if first is last else first
        all_of_it = last.get(whole) - base.get(whole)
        return (last.get(part) - base.get(part)) / all_of_it if all_of_it else None


def screen(history: History, url: str, width: int) -> Panel:
    """The figures as a panel."""
    last = history.readings[-1]
    bar = max(10, min(50, width - 52))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()

    blocks = {s: last.get(f"zipage:kv_blocks/{s}") for s in ("owned", "cached", "free")}
    total = sum(blocks.values()) or 1.0
    owned, cached = (round(bar * blocks[s] / total) for s in ("owned", "cached"))
    cached = min(cached, bar - owned)
    pool = Text.assemble(
        ("█" * owned, "cyan"), ("█" * cached, "blue"), ("·" * (bar - owned - cached), "dim")
    )
    generated = history.rate("vllm:generation_tokens_total")
    prompt = history.rate("vllm:prompt_tokens_total")
    grid.add_row(
        "tokens/s",
        Text(sparkline(list(history.rates)[-bar:]), style="green"),
        f"{_number(generated)} generated, {_number(prompt)} of prompts",
    )
    running, waiting = (last.get(f"vllm:num_requests_{s}") for s in ("running", "waiting"))
    dots = ("●" * min(int(running), bar), "green"), ("○" * min(int(waiting), bar), "dim")
    shown = Text.assemble(*dots)
    shown.truncate(bar)
    swapped = last.get("vllm:num_requests_swapped")
    compressing = last.get("zipage:requests_compressing")
    grid.add_row(
        "requests",
        shown,
        f"{running:,.0f} running ({compressing:,.0f} compressing), {waiting:,.0f} waiting "
        f"({swapped:,.0f} swapped)",
    )
    grid.add_row(
        "KV pool", pool, ", ".join(f"{count:,.0f} {state}" for state, count in blocks.items())
    )
    slots, used = last.get("zipage:query_slots"), last.get("zipage:query_slots_in_use")
    grid.add_row(
        "query slots",
        ProgressBar(total=max(slots, 1.0), completed=used, width=bar),
        f"{used:,.0f} of {slots:,.0f} in use",
    )
    compressions, evicted = "zipage:compressions_total", "zipage:evicted_tokens_total"
    grid.add_row(
        "compressions",
        f"{_number(history.rate(compressions))}/s, {last.get(compressions):,.0f} in all",
        f"{_number(history.rate(evicted))} tokens evicted/s, {last.get(evicted):,.0f} in all",
    )
    for label, name in (
        ("first token", "vllm:time_to_first_token_seconds"),
        ("between tokens", "vllm:inter_token_latency_seconds"),
        ("whole request", "vllm:e2e_request_latency_seconds"),
    ):
        p50, p95 = history.percentile(name, 0.5), history.percentile(name, 0.95)
        grid.add_row(label, f"{_seconds(p50)} median", f"{_seconds(p95)} at 95 %")
    hits = history.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    ended = {r: last.get(f"vllm:request_success_total/{r}") for r in ("stop", "length", "abort")}
    failed = last.get("vllm:request_success_total/error")
    kinds = {kind: last.get(f"zipage:preemptions_total/{kind}") for kind in ("recompute", "swap")}
    grid.add_row(
        "prefix cache",
        "-" if hits is None else f"{100 * hits:.0f} % found",
        f"preemptions: {kinds['recompute']:,.0f} recomputed, {kinds['swap']:,.0f} swapped",
    )
    grid.add_row(
        "ended",
        f"{sum(ended.values()) + failed:,.0f} answers",
        ", ".join(f"{count:,.0f} {reason}" for reason, count in ended.items())
        + f", {failed:,.0f} failed; {last.get('zipage:queue_refusals_total'):,.0f} refused",
    )
    state = Text() if last.get("zipage:engine_up") else Text("the engine is down", "bold red")
    restarts = last.get("zipage:engine_restarts_total")
    if restarts:
        state.append(f"  {restarts:,.0f} restarts of the engine", "yellow")
    rows = [grid, state] if state else [grid]
    title = f"[bold]{last.model_name}[/] at {url}"
    return Panel(Group(*rows), title=title, title_align="left")


def sparkline(values: Iterable[float]) -> str:
    """Values as a row of bars; the tallest fills the line."""
    values = list(values)
    most = max(values, default=0.0)
    if most <= 0:
        return "▁" * len(values)
    return "".join(_BARS[max(1, round(8 * max(0.0, v) / most))] for v in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def top(
    url: Annotated[
        str, typer.Option(help="URL of the server, its API or its metrics.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Read once, print and exit.")] = False,
) -> None:
    """Show what a running server is doing.

    Continues when the server is restarted; Ctrl-C ends it. If the output is not a terminal, every
    reading is printed. Needs `pip install 'zipage[serve]'`.
    """
    try:
        import httpx
        import prometheus_client.parser  # noqa: F401
    except ImportError as error:
        message = f"zipage top needs {error.name}: pip install 'zipage[serve]'"
        raise ConfigError(message) from None
    address = url.rstrip("/").removesuffix("/v1")
    if "://" not in address:
        address = f"http://{address}"
    metrics = address if address.endswith("/metrics") else f"{address}/metrics"
    console, history = Console(), History()

    def read(client: httpx.Client) -> str | None:
        """Take a reading; returns what went wrong, or None."""
        try:
            answer = client.get(metrics)
            answer.raise_for_status()
            history.add(read_metrics(answer.text, time.monotonic()))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"no metrics from {metrics}: {error}"
        return None

    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as client:
        problem = read(client)
        if once or (problem is not None and not console.is_terminal):
            if problem is not None:
                raise ConfigError(f"url={url!r}: {problem}")
            console.print(screen(history, address, console.width))
            return
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                shown: list[Panel | Text] = []
                if history.readings:
                    shown.append(screen(history, address, console.width))
                if problem is not None:
                    shown.append(Text(f"{problem}; trying again", "yellow"))
                if console.is_terminal:
                    live.update(Group(*shown), refresh=True)
                else:
                    console.print(*shown)
                time.sleep(interval)
                problem = read(client)
