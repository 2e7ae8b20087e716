"""The serving benchmark: requests sent on schedule, and statistics of their answers."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zipage.bench.arrivals import ServingRequest
from zipage.bench.openai_client import Connections, Endpoint, Exchange, send
from zipage.errors import ConfigError, ZipageError

#: Latencies that a service-level objective can be about.
OBJECTIVES = ("ttft", "tpot", "e2el")

PERCENTILES = (50, 90, 95, 99)

#: Delay before the schedule's start: without it the first requests would be late.
_LEAD_SECONDS = 0.05
#: Seconds between checks whether the client's own event loop is held up.
_TICK = 0.02


@dataclass(frozen=True)
class ServingRun:
    """The measurements of a run.

    Attributes:
        exchanges: all requests, in the order given.
        started: the zero of their schedule, on `time.perf_counter`'s clock.
        loop_delays: how much later than requested the client's event loop woke up, in seconds:
            the client's times are no more accurate than that.
    """

    exchanges: Sequence[Exchange]
    started: float
    loop_delays: Sequence[float]


async def run_serving(
    endpoint: Endpoint,
    requests: Sequence[ServingRequest],
    concurrency: int | None = None,
    warm_up: Sequence[ServingRequest] = (),
    on_end: Callable[[int], None] | None = None,
) -> ServingRun:
    """Send requests and read their answers.

    Each is sent at its scheduled time, whatever the state of earlier ones, and its latency counts
    from then, even if this program was late: a slow server can't hide by slowing the client down.
    With `concurrency` there is no schedule: a request is sent when an earlier one has ended.

    Args:
        endpoint: where to send them.
        requests: requests in order of arrival.
        concurrency: how many are in flight at once, instead of a schedule.
        warm_up: requests sent first, all at once, and not counted.
        on_end: called with the number of requests that have ended, at each end.

    Raises:
        ZipageError: a warm-up request failed.
    """
    async with Connections() as connections:
        now = time.perf_counter()
        warm = await asyncio.gather(
            *(send(connections, endpoint, r, endpoint.encode(r), now) for r in warm_up)
        )
        for exchange in warm:
            if exchange.failure is not None:
                advice = " (give --vocab-size)" if "vocabulary" in str(exchange.detail) else ""
                raise ZipageError(
                    f"a warm-up request failed: {exchange.failure}: {exchange.detail}{advice}"
                )
        contents = [endpoint.encode(request) for request in requests]
        # A garbage collection of everything imported so far would stall all streams.
        gc.collect()
        gc.freeze()
        started = time.perf_counter() + _LEAD_SECONDS
        exchanges: list[Exchange | None] = [None] * len(requests)
        ended = 0

        async def exchange_of(i: int, intended: float) -> None:
            nonlocal ended
            exchanges[i] = await send(connections, endpoint, requests[i], contents[i], intended)
            ended += 1
            if on_end is not None:
                on_end(ended)

        delays: list[float] = []
        ticker = asyncio.create_task(_measure_delays(delays))
        try:
            if concurrency is None:
                await _on_schedule(requests, started, exchange_of)
            else:
                await _in_turn(len(requests), concurrency, started, exchange_of)
        finally:
            ticker.cancel()
            gc.unfreeze()
    return ServingRun([e for e in exchanges if e is not None], started, delays)


async def _on_schedule(requests: Sequence[ServingRequest], started: float, send_one: Any) -> None:
    async with _Tasks() as tasks:
        for i, request in enumerate(requests):
            intended = started + (request.arrival or 0.0)
            if (wait := intended - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.start(send_one(i, intended))


async def _in_turn(count: int, concurrency: int, started: float, send_one: Any) -> None:
    left = iter(range(count))

    async def worker() -> None:
        await asyncio.sleep(started - time.perf_counter())
        free = started
        for i in left:
            await send_one(i, free)
            free = time.perf_counter()

    async with _Tasks() as tasks:
        for _ in range(min(concurrency, count)):
            tasks.start(worker())


class _Tasks:
    """Tasks that are awaited at the end, or cancelled on an error."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def __aenter__(self) -> _Tasks:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()


async def _measure_delays(delays: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK)
        delays.append(max(0.0, time.perf_counter() - before - _TICK))


# ---------------------------------------------------------------------- statistics


def parse_objectives(texts: Iterable[str]) -> dict[str, float]:
    """Parse objectives such as ``ttft:500``, in milliseconds; a text may hold several.

    Raises:
        ConfigError: an objective is not of that form.
    """
    objectives = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, colon, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not colon or not limit > 0:
            raise ConfigError(
                f"goodput={part!r}: write {' or '.join(OBJECTIVES)}, a colon and milliseconds, "
                "such as ttft:500"
            )
        objectives[name] = limit
    return objectives


def meets(exchange: Exchange, objectives: Mapping[str, float]) -> bool:
    """Whether a request was answered within all objectives (milliseconds)."""
    if exchange.failure is not None:
        return False
    return all(
        (latency := getattr(exchange, name)) is None or 1000 * latency <= limit
        for name, limit in objectives.items()
    )


def summarize(run: ServingRun, objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Throughput, latencies (milliseconds), failures by kind, and the client's accuracy.

    Args:
        run: result of `run_serving`.
        objectives: from `parse_objectives`; if there are any, goodput is the requests per second
            that meet them all.
    """
    good = [e for e in run.exchanges if e.failure is None]
    failed = [e for e in run.exchanges if e.failure is not None]
    first = min(e.intended for e in run.exchanges)
    seconds = max(e.ended for e in run.exchanges) - first
    output_tokens = sum(e.tokens for e in good)
    prompt_tokens = sum(_prompt_tokens(e) for e in good)
    summary: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(run.exchanges),
        "completed": len(good),
        "failures": dict(Counter(str(e.failure) for e in failed)),
        "failure_details": {str(e.failure): e.detail for e in reversed(failed)},
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "without_usage": sum(e.output_tokens is None for e in good),
        "shorter_than_asked": sum(_is_short(e) for e in good),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "mean_in_flight": sum(e.ended - e.intended for e in run.exchanges) / seconds,
        "peak_in_flight": _peak_in_flight(run.exchanges),
        "ttft_ms": distribution([(1000 * e.ttft, 1) for e in good]),
        "tpot_ms": distribution([(1000 * e.tpot, 1) for e in good if e.tpot is not None]),
        "itl_ms": distribution(
            [(1000 * gap, count) for e in good for gap, count in e.inter_token_latencies()]
        ),
        "e2el_ms": distribution([(1000 * e.e2el, 1) for e in good]),
        "sent_late_ms": distribution([(1000 * (e.sent - e.intended), 1) for e in run.exchanges]),
        "client_delay_ms": distribution([(1000 * delay, 1) for delay in run.loop_delays]),
    }
    if objectives:
        within = sum(meets(e, objectives) for e in run.exchanges)
        summary["goodput"] = {
            "objectives_ms": dict(objectives),
            "requests_per_second": within / seconds,
            "share": within / len(run.exchanges),
        }
    return summary


def records(run: ServingRun) -> list[dict[str, Any]]:
    """Every request as plain values, times in seconds from the start."""
    return [
        {
            "intended": e.intended - run.started,
            "sent": e.sent - run.started,
            "first_token": e.chunk_times[0] - run.started if e.chunk_times else None,
            "last_token": e.chunk_times[-1] - run.started if e.chunk_times else None,
            "ended": e.ended - run.started,
            "prompt_tokens": e.prompt_tokens,
            "output_tokens": e.output_tokens,
            "chunks": len(e.chunk_times),
            "asked_for": e.request.output_len,
            "failure": e.failure,
            "detail": e.detail,
        }
        for e in run.exchanges
    ]


def distribution(weighted: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    """Mean, percentiles and maximum of values with weights; None without any.

    A percentile is the least value that this share of the weight does not exceed.
    """
    if not weighted:
        return None
    ordered = sorted(weighted)
    total = math.fsum(weight for _, weight in ordered)
    told = {"mean": math.fsum(value * weight for value, weight in ordered) / total}
    position, below = 0, ordered[0][1]
    for percent in PERCENTILES:
        while below < total * percent / 100 - 1e-9 * total and position < len(ordered) - 1:
            position += 1
            below += ordered[position][1]
        told[f"p{percent}"] = ordered[position][0]
    return {**told, "max": ordered[-1][0]}


def _prompt_tokens(exchange: Exchange) -> int:
    """As the server reports, else the number of ids sent."""
    if exchange.prompt_tokens is not None:
        return exchange.prompt_tokens
    prompt = exchange.request.prompt
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else 0


def _is_short(exchange: Exchange) -> bool:
    asked = exchange.request.output_len
    return asked is not None and exchange.output_tokens is not None and exchange.tokens < asked


def _peak_in_flight(exchanges: Sequence[Exchange]) -> int:
    changes = sorted([(e.ended, -1) for e in exchanges] + [(e.intended, 1) for e in exchanges])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
