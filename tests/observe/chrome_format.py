"""What a file must be like to be a Chrome trace, checked independently of the writer."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

#: Times are written with nanoseconds, in microseconds.
_EPSILON = 5e-4


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check a trace against the Trace Event format; returns its events without metadata.

    The object form, the keys each phase needs, ascending times, slices of one track that are
    disjoint or nested, names for every process and track, numbers for counters.
    """
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace, "not plain JSON"
    events = trace["traceEvents"]
    assert isinstance(events, list) and events
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    named: set[tuple[str, Any]] = set()
    seen: set[tuple[str, Any]] = set()
    slices = defaultdict(list)
    before = 0.0
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= event.keys(), event
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        assert event["ts"] >= 0
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            if event["name"] == "process_name":
                named.add(("process", event["pid"]))
            elif event["name"] == "thread_name":
                named.add(("thread", track))
            else:
                assert event["name"] == "thread_sort_index"
                assert type(event["args"]["sort_index"]) is int
                continue
            assert isinstance(event["args"]["name"], str) and event["args"]["name"]
            continue
        assert event["ts"] >= before, "times go back"
        before = event["ts"]
        seen |= {("process", event["pid"]), ("thread", track)}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "i":
            assert event["s"] in ("t", "p", "g") and "dur" not in event
        else:
            assert event["ph"] == "C", event
            assert event["args"], "a counter without a value"
            assert all(type(value) in (int, float) for value in event["args"].values())
    assert seen <= named, f"without a name: {seen - named}"
    for track, of_track in slices.items():
        _check_nesting(track, of_track)
    return [event for event in events if event["ph"] != "M"]


def _check_nesting(track: Any, slices: list[tuple[float, float, str]]) -> None:
    open_slices: list[tuple[float, float, str]] = []
    for start, end, name in slices:
        while open_slices and open_slices[-1][1] <= start + _EPSILON:
            open_slices.pop()
        if open_slices:
            assert end <= open_slices[-1][1] + _EPSILON, (
                f"track {track}: {name!r} at {start} .. {end} overlaps {open_slices[-1]}"
            )
        open_slices.append((start, end, name))
