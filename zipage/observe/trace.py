"""Recording what the engine does to requests, for a viewer of Chrome traces."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zipage.compression.job import CompressionJob
from zipage.engine.request import Request, RequestStatus
from zipage.observe.chrome import TraceEvent, Track, dump_trace
from zipage.observe.keepers import encode_runs
from zipage.outputs import CompressionRecord, FinishReason, RequestMetrics

if TYPE_CHECKING:
    from zipage.engine.scheduler import ScheduledTokens, Scheduler
    from zipage.engine.stats import StepStats

DEFAULT_MAX_EVENTS = 500_000
"""Each takes about 100 bytes in memory and in JSON."""

#: Share of the events that slices of steps leave to rarer events.
_RESERVE = 0.1
#: Characters of kept positions that count as one event.
_CHARACTERS_PER_EVENT = 100

ENGINE, REQUESTS = 1, 2
STEPS = Track(ENGINE, 1, "steps")
COMPRESSIONS = Track(ENGINE, 2, "compressions")


@dataclasses.dataclass(eq=False)
class _Lane:
    """The track of one request, and its state after the last step."""

    request: Request
    track: Track
    #: What it is waiting for, and since when; None while it is computed.
    waits: tuple[str, float] | None
    #: Whether it owns no blocks: not admitted yet, or preempted.
    outside: bool = True
    admitted: bool = False
    lease: tuple[int, int] | None = None
    preemptions: int = 0
    tokens_seen: bool = False
    #: End of the last slice inside the request's own.
    until: float = 0.0


class TraceRecorder:
    """Records the life of the requests submitted while it is attached to an engine.

    See `LLM.trace`. Every traced request has a track: a slice for each step that computed some of
    its tokens, slices for its waits in between, instants for its events, and around them one slice
    from its submission to its end. Two more tracks show the engine's steps and its compressions;
    counters show the KV blocks by state, the requests and the query slots.

    The engine's thread calls `submitted`, `compression_submitted`, `compression_ended`,
    `step_ended` and `ended`; their times are `time.perf_counter`'s, in seconds.

    Args:
        max_events: most events kept. Once 90 % are used, slices of steps are dropped, and once all
            are, everything; `dropped_events` counts dropped events.
    """

    def __init__(self, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, got {max_events}")
        self.max_events = max_events
        self.dropped_events = 0
        self._used = 0.0
        self._events: list[TraceEvent] = []
        self._tracks = [STEPS, COMPRESSIONS]
        self._lanes: dict[str, _Lane] = {}
        self._numbers = itertools.count(1)
        self._gauges: dict[str, dict[str, int]] = {}
        self._compressed_until = 0.0
        self._origin = time.perf_counter()

    # ------------------------------------------------------------------ called by the engine

    def submitted(self, request: Request, name: str) -> None:
        """A request was queued; `name` is its track's."""
        track = Track(REQUESTS, next(self._numbers), name)
        self._tracks.append(track)
        lane = _Lane(request, track, ("queued", request.arrival_time))
        self._lanes[request.request_id] = lane
        self._instant(lane, "submitted", request.arrival_time, prompt_tokens=request.prompt_len)

    def compression_submitted(self, job: CompressionJob, at: float) -> None:
        """The compression of a request was planned and handed to the executor."""
        lane = self._lanes.get(job.request_id)
        if lane is not None:
            self._wait(lane, "compressing", at)

    def compression_ended(
        self,
        job: CompressionJob,
        started: float,
        seconds: float,
        noticed: float,
        record: CompressionRecord | None,
    ) -> None:
        """A compression ended; `record` is given if its request is traced."""
        args: dict[str, Any] = {
            "request": job.request_id,
            "index": job.compression_index,
            "text_tokens": job.num_tokens,
            "length": job.length,
            "kept": job.keep,
            "blocks_before": len(job.source_blocks),
            "blocks_after": len(job.target_blocks),
            "copied_blocks": len(set(job.target_blocks) - set(job.source_blocks)),
            "seconds": seconds,
        }
        size = 1.0
        if record is not None:
            runs = encode_runs(record.keepers)
            size += len(runs) / _CHARACTERS_PER_EVENT
            args |= {
                "lists": record.lists,
                "keepers": runs,
                "layer_positions": " ".join(map(str, record.layer_positions)),
            }
        # They run one after another; on a CUDA stream, `started` is when it was queued.
        started = max(started, self._compressed_until)
        self._compressed_until = max(started, min(started + seconds, noticed))
        self._slice(COMPRESSIONS, "compression", started, self._compressed_until, args, size)
        lane = self._lanes.get(job.request_id)
        if lane is not None:
            self._computes(lane, noticed)
            evicted = job.length - job.keep
            self._instant(lane, "compressed", noticed, length=job.length, evicted=evicted)

    def step_ended(
        self,
        step: StepStats,
        scheduler: Scheduler,
        scheduled: list[ScheduledTokens],
        started: float,
        planned: float,
        ended: float,
    ) -> None:
        """A step ran from `started` to `ended`; its plan was ready at `planned`."""
        args = {
            "step": step.index,
            "requests": len(scheduled),
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens,
        }
        self._slice(STEPS, "step", started, ended, args, frequent=True)
        computed = {item.request.request_id: item for item in scheduled}
        for lane in self._lanes.values():
            self._follow(lane, computed.get(lane.request.request_id), scheduler, planned, ended)
        pool = scheduler.pool
        self._count(
            "KV blocks", ended, owned=pool.num_owned, cached=pool.num_cached, free=pool.num_free
        )
        swapped = sum(r.status is RequestStatus.SWAPPED for r in scheduler.waiting)
        self._count(
            "requests",
            ended,
            running=len(scheduler.running) - len(scheduler.jobs),
            compressing=len(scheduler.jobs),
            waiting=len(scheduler.waiting) - swapped,
            swapped=swapped,
        )
        self._count("query slots", ended, leased=scheduler.num_query_slots_in_use)

    def ended(self, sequence_id: str, reason: FinishReason, metrics: RequestMetrics) -> None:
        """A request ended; does nothing if it is not traced."""
        lane = self._lanes.pop(sequence_id, None)
        if lane is None:
            return
        request = lane.request
        now = time.perf_counter()
        self._computes(lane, now)
        self._instant(lane, "finished", now, finish_reason=reason)
        args = {
            "request": request.request_id,
            "prompt_tokens": request.prompt_len,
            "generated_tokens": request.num_output_tokens,
            "finish_reason": reason,
            **dataclasses.asdict(metrics),
        }
        self._slice(lane.track, lane.track.name, request.arrival_time, now, args)

    # ------------------------------------------------------------------ one request in one step

    def _follow(
        self,
        lane: _Lane,
        item: ScheduledTokens | None,
        scheduler: Scheduler,
        planned: float,
        ended: float,
    ) -> None:
        request = lane.request
        if request.preemptions != lane.preemptions:
            lane.preemptions = request.preemptions
            kind = "swap" if request.compressed else "recompute"
            self._instant(lane, "preempted", planned, kind=kind)
            self._wait(lane, "swapped out" if kind == "swap" else "to be recomputed", planned)
            lane.outside, lane.lease = True, None
        # A request that was admitted for its last token has already ended.
        outside = item is None and request.status is not RequestStatus.RUNNING
        if lane.outside and not outside:
            lane.outside = False
            self._admitted(lane, planned)
        if request.query_slot is not None:
            lease = (request.query_slot, request.compressions)
            if lease != lane.lease:
                lane.lease = lease
                self._instant(lane, "query slot leased", planned, slot=request.query_slot)
        if item is not None:
            self._computes(lane, planned)
            first = request.num_output_tokens <= 1
            prefills = item.num_tokens > 1 or not item.samples or first
            args = {"tokens": item.num_tokens, "cache_length": request.length}
            name = "prefill" if prefills else "decode"
            self._slice(lane.track, name, planned, ended, args, frequent=True)
            lane.until = ended
        elif request.status is RequestStatus.RUNNING and lane.until <= planned:
            # Not if a compression that this step waited for has just ended.
            self._wait(lane, _what_for(request, scheduler), planned)
        if request.first_token_time is not None and not lane.tokens_seen:
            lane.tokens_seen = True
            self._instant(lane, "first token", request.first_token_time)

    def _admitted(self, lane: _Lane, at: float) -> None:
        request = lane.request
        self._computes(lane, at)
        if lane.admitted:
            self._instant(lane, "resumed", at, cache_length=request.length)
            return
        lane.admitted = True
        cached = request.cached_prompt_tokens or 0
        self._instant(lane, "admitted", at, blocks=len(request.block_ids))
        if cached:
            self._instant(lane, "prefix hit", at, tokens=cached)

    def _wait(self, lane: _Lane, what: str, at: float) -> None:
        """The request waits for something from now on; no change if it already did."""
        if lane.waits is None or lane.waits[0] != what:
            self._computes(lane, at)
            lane.waits = (what, at)

    def _computes(self, lane: _Lane, at: float) -> None:
        """The request no longer waits."""
        if lane.waits is not None:
            what, since = lane.waits
            lane.waits, lane.until = None, at
            self._slice(lane.track, what, since, at, {})

    # ------------------------------------------------------------------ events

    def _slice(
        self,
        track: Track,
        name: str,
        start: float,
        end: float,
        args: dict[str, Any],
        size: float = 1.0,
        frequent: bool = False,
    ) -> None:
        begun, ended = self._nanoseconds(start), self._nanoseconds(end)
        event = TraceEvent("X", track, name, begun, args, max(ended - begun, 0))
        self._keep(event, size, frequent)

    def _instant(self, lane: _Lane, name: str, at: float, **args: Any) -> None:
        self._keep(TraceEvent("i", lane.track, name, self._nanoseconds(at), args))

    def _count(self, name: str, at: float, **values: int) -> None:
        # A viewer holds the last value, so only changes need to be written.
        if self._gauges.get(name) != values:
            self._gauges[name] = values
            event = TraceEvent("C", STEPS, name, self._nanoseconds(at), dict(values))
            self._keep(event, frequent=True)

    def _keep(self, event: TraceEvent, size: float = 1.0, frequent: bool = False) -> None:
        room = self.max_events * (1 - _RESERVE) if frequent else self.max_events
        if self._used + size > room:
            self.dropped_events += 1
            return
        self._used += size
        self._events.append(event)

    def _nanoseconds(self, at: float) -> int:
        return max(0, round((at - self._origin) * 1e9))

    # ------------------------------------------------------------------ reading it

    def to_dict(self) -> dict[str, Any]:
        """The trace in Chrome's JSON object format; running requests are shown up to now."""
        now = self._nanoseconds(time.perf_counter())
        events = list(self._events)
        for lane in list(self._lanes.values()):
            if lane.waits is not None:
                what, since = lane.waits
                begun = self._nanoseconds(since)
                events.append(TraceEvent("X", lane.track, what, begun, {}, now - begun))
            begun = self._nanoseconds(lane.request.arrival_time)
            args = {"request": lane.request.request_id, "finish_reason": None}
            events.append(TraceEvent("X", lane.track, lane.track.name, begun, args, now - begun))
        names = {ENGINE: "engine", REQUESTS: "requests"}
        return dump_trace(events, self._tracks, names, {"dropped_events": self.dropped_events})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a JSON file for chrome://tracing and ui.perfetto.dev."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=True)
        Path(path).write_text(text + "\n", encoding="utf-8")


def _what_for(request: Request, scheduler: Scheduler) -> str:
    """Why a running request was given no tokens."""
    if request.compression_due:
        return "waits for blocks to compress into"
    if request.trigger is not None and request.query_slot is None:
        missing = request.trigger - request.window - request.length
        if missing <= 0:
            return "waits for a query slot"
    if request.num_pending > 1 and scheduler.token_budget_left <= 0:
        return "waits for the token budget"
    return "waits for KV blocks"
