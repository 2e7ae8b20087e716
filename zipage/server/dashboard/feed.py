"""What happened in each of the last seconds: the figures of the dashboard."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from zipage.engine.client import EngineClient
from zipage.engine.stats import EngineStats

#: Seconds of history in the charts.
HISTORY = 300
#: Seconds over which latencies are taken.
RECENT = 60
#: Percentiles are exact within this factor.
_RESOLUTION = 1.02


class RecentTimes:
    """Percentiles of the times observed in the last `RECENT` seconds, in bounded memory."""

    def __init__(self) -> None:
        self._now: Counter[int] = Counter()
        self._seconds: deque[Counter[int]] = deque(maxlen=RECENT)

    def observe(self, values: Iterable[float]) -> None:
        """Take times in seconds."""
        for value in values:
            self._now[round(math.log(max(value, 1e-6), _RESOLUTION))] += 1

    def tick(self) -> None:
        """End the current second."""
        self._seconds.append(self._now)
        self._now = Counter()

    def percentiles(self, shares: Sequence[float]) -> list[float | None]:
        """For each of `shares`, the time that this share of all times does not exceed; None if
        there are none."""
        counts: Counter[int] = sum(self._seconds, Counter())
        total = counts.total()
        if not total:
            return [None] * len(shares)
        found: list[float | None] = []
        for share in shares:
            wanted, seen = max(1, math.ceil(share * total)), 0
            for step in sorted(counts):
                seen += counts[step]
                if seen >= wanted:
                    found.append(_RESOLUTION**step)
                    break
        return found


class Feed:
    """A sample of the engine's figures for each of the last `HISTORY` seconds.

    Args:
        engine: the engine to sample; `observe` must be called after each of its steps.
        interval: seconds between two samples.
    """

    def __init__(self, engine: EngineClient, interval: float = 1.0) -> None:
        self._engine, self._interval = engine, interval
        self._samples: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._first_token, self._inter_token = RecentTimes(), RecentTimes()
        self._lock = threading.Lock()
        self._changed = asyncio.Condition()
        self._last = engine.stats()
        self._last_time = time.monotonic()
        self._lookups: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def observe(self, stats: EngineStats) -> None:
        """Record the times of the last step of `stats`. From any thread."""
        with self._lock:
            self._first_token.observe(stats.last_step.first_token_seconds)
            self._inter_token.observe(stats.last_step.inter_token_seconds)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self._samples.append(self._sample())
            async with self._changed:
                self._changed.notify_all()

    async def follow(self, ends: Callable[[], bool]) -> AsyncGenerator[list[dict[str, Any]], None]:
        """All samples so far, then new ones as they come, until `ends` returns True."""
        yield list(self._samples)
        latest = self._samples[-1]["time"] if self._samples else 0.0
        while not ends():
            async with self._changed:
                await self._changed.wait()
            fresh = [sample for sample in self._samples if sample["time"] > latest]
            if fresh:
                latest = fresh[-1]["time"]
                yield fresh

    def _sample(self) -> dict[str, Any]:
        stats, now = self._engine.stats(), time.monotonic()
        last, seconds = self._last, max(now - self._last_time, 1e-6)
        self._last, self._last_time = stats, now
        with self._lock:
            times = {"ttft": self._first_token, "inter_token": self._inter_token}
            latencies = {}
            for name, recent in times.items():
                recent.tick()
                latencies[f"{name}_p50"], latencies[f"{name}_p95"] = recent.percentiles((0.5, 0.95))

        def rate(field: str) -> float:
            more: float = getattr(stats, field) - getattr(last, field)
            return max(0.0, more) / seconds

        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        self._lookups.append((queries, stats.prefix_cache_hits - last.prefix_cache_hits))
        looked_up = sum(number for number, _ in self._lookups)
        found = sum(hits for _, hits in self._lookups)
        return {
            "time": time.time(),
            "seconds": seconds,
            "up": self._engine.is_running,
            "generated": rate("generated_tokens"),
            "prompt": rate("prompt_tokens"),
            "running": stats.running,
            "waiting": stats.waiting,
            "swapped": stats.swapped,
            "compressing": stats.compressing,
            "owned": stats.blocks_owned,
            "cached": stats.blocks_cached,
            "free": stats.blocks_free,
            "compressions": rate("compressions"),
            "evicted": rate("evicted_tokens"),
            "recomputed": rate("preemptions_recompute"),
            "swaps": rate("preemptions_swap"),
            "slots_used": stats.query_slots_in_use,
            "slots": stats.query_slots_total,
            "hit_rate": found / looked_up if looked_up else None,
            **latencies,
            "totals": {
                "requests": stats.requests_submitted,
                "generated": stats.generated_tokens,
                "prompt": stats.prompt_tokens,
                "compressions": stats.compressions,
                "evicted": stats.evicted_tokens,
                "preemptions": stats.preemptions,
                "errors": stats.completions_error,
                "refusals": self._engine.queue_refusals,
                "restarts": stats.engine_restarts,
            },
        }
