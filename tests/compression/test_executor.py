"""Executors tell how long compressions took; on a CUDA stream, as the device measured it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zipage.compression.executor import (
    CompressionOutcome,
    StreamExecutor,
    SyncExecutor,
    ThreadExecutor,
)
from zipage.compression.job import CompressionJob

KEPT = torch.arange(4)


def job(name: str) -> CompressionJob:
    return CompressionJob(name, (0, 1, 2), (0, 1), 33, 32, 0, 0, 40, 10, 0)


def slow(job: CompressionJob) -> torch.Tensor | None:
    time.sleep(0.02)
    if job.request_id == "bad":
        raise MemoryError("no workspace")
    return KEPT


@pytest.mark.parametrize("kind", [SyncExecutor, ThreadExecutor])
def test_cpu_executors_time_each_job(kind: Any) -> None:
    executor = kind(slow)
    before = time.perf_counter()
    done: list[CompressionOutcome] = []
    for name in ("one", "bad", "two"):
        executor.submit(job(name))
    while len(done) < 3:
        done += executor.wait()
    executor.shutdown()
    assert [o.request_id for o in done] == ["one", "bad", "two"]
    assert [o.kept is KEPT for o in done] == [True, False, True]
    assert isinstance(done[1].error, MemoryError)
    assert all(o.seconds >= 0.02 for o in done)
    ends = [before] + [o.started + o.seconds for o in done]
    assert all(end <= o.started for end, o in zip(ends, done, strict=False))


class FakeDevice:
    """A CUDA device on which queued work ends when the test says so."""

    def __init__(self) -> None:
        self.clock = 0.0  # milliseconds
        self.ended = 0
        self.recorded: list[FakeEvent] = []
        self.stream: Any = FakeStream(self)

    def run(self, events: int, milliseconds: float) -> None:
        """Come past the next `events` recorded events."""
        for _ in range(events):
            self.clock += milliseconds
            self.recorded[self.ended].time = self.clock
            self.ended += 1


class FakeEvent:
    device: FakeDevice

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.time: float | None = None

    def record(self, stream: Any) -> None:
        self.device.recorded.append(self)

    def query(self) -> bool:
        return self.time is not None

    def synchronize(self) -> None:
        while self.time is None:
            self.device.run(1, 1.0)

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.timed and end.timed):
            raise RuntimeError("events were created without timing")
        if self.time is None or end.time is None:
            raise RuntimeError("an event has not been completed")
        return end.time - self.time


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    FakeEvent.device = device

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return device


def test_stream_executor_reads_the_devices_time_when_it_is_done(device: FakeDevice) -> None:
    def run(job: CompressionJob) -> torch.Tensor | None:
        if job.request_id == "bad":
            raise MemoryError("no workspace")
        return KEPT

    executor = StreamExecutor(run, torch.device("cpu"))
    before = time.perf_counter()
    executor.submit(job("one"))
    executor.submit(job("two"))
    assert executor.poll() == []
    device.run(1, 3.0)  # the first began
    assert executor.poll() == []
    device.run(2, 4.0)  # the first ended, the second began
    (one,) = executor.poll()
    assert (one.request_id, one.error, one.seconds) == ("one", None, 0.004)
    assert one.kept is KEPT and before <= one.started <= time.perf_counter()
    assert device.recorded[1] in device.stream.waited, "its blocks are used after it ended"
    (two,) = executor.wait()
    assert (two.request_id, two.seconds) == ("two", 0.001)
    executor.submit(job("bad"))
    (bad,) = executor.poll()
    assert isinstance(bad.error, MemoryError) and bad.kept is None
    assert executor.wait() == []
