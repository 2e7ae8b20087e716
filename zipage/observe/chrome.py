"""Chrome's Trace Event format, read by chrome://tracing and ui.perfetto.dev.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Track(NamedTuple):
    """A line of the viewer: a thread of a process, in the format's terms."""

    process: int
    thread: int
    name: str


class TraceEvent(NamedTuple):
    """One event; times are nanoseconds since the trace began.

    `phase` is ``X`` (a slice of a track; slices of one track are disjoint or nested), ``i`` (an
    instant) or ``C`` (counters of a process, from now on).
    """

    phase: Literal["X", "i", "C"]
    track: Track
    name: str
    start: int
    args: dict[str, Any]
    duration: int = 0


def dump_trace(
    events: Iterable[TraceEvent],
    tracks: Sequence[Track],
    processes: Mapping[int, str],
    other_data: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON object of a trace.

    Args:
        events: in any order.
        tracks: all tracks, in the order in which they are shown.
        processes: names of the processes, the groups of tracks.
        other_data: further metadata for readers.
    """
    entries: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        for pid, name in processes.items()
    ]
    for order, track in enumerate(tracks):
        where = {"ph": "M", "pid": track.process, "tid": track.thread, "ts": 0}
        entries.append({**where, "name": "thread_name", "args": {"name": track.name}})
        entries.append({**where, "name": "thread_sort_index", "args": {"sort_index": order}})
    # Of slices that begin together the longest comes first, as it contains the others.
    for event in sorted(events, key=lambda e: (e.start, -e.duration)):
        entry: dict[str, Any] = {
            "ph": event.phase,
            "name": event.name,
            "pid": event.track.process,
            "tid": event.track.thread,
            "ts": event.start / 1000,
            "args": event.args,
        }
        if event.phase == "X":
            entry["dur"] = event.duration / 1000
        elif event.phase == "i":
            entry["s"] = "t"
        entries.append(entry)
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": dict(other_data)}
