"""Where compressions run: inline, on a worker thread, or on a CUDA stream of their own."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from zipage.compression.job import CompressionJob

#: Carries out a compression; returns the positions it kept, on the CPU, if the job requests them.
RunJob = Callable[[CompressionJob], torch.Tensor | None]

#: Seconds between two checks that the worker thread is alive.
_LIVENESS_INTERVAL = 1.0
#: Longest wait for a compression in flight when an executor is dropped or the program ends.
_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class CompressionOutcome:
    """A compression that ended.

    Attributes:
        request_id: its request.
        error: the exception it raised, if it failed.
        kept: ``[L, H, keep]`` text positions it kept, if the job requested them.
        started: when it began (`time.perf_counter`); on a CUDA stream, when it was queued there.
        seconds: its duration; on a CUDA stream as measured by the device.
    """

    request_id: str
    error: BaseException | None
    kept: torch.Tensor | None = None
    started: float = 0.0
    seconds: float = 0.0


class CompressionExecutor(ABC):
    """Runs compressions; used from the engine's thread only."""

    @abstractmethod
    def submit(self, job: CompressionJob) -> None:
        """Start a compression. If this raises an `Exception`, it was not started."""

    @abstractmethod
    def poll(self) -> list[CompressionOutcome]:
        """Compressions that ended since the last call. Never waits."""

    @abstractmethod
    def wait(self) -> list[CompressionOutcome]:
        """Like `poll`, but waits for one if any is in flight."""

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for what is in flight and release threads."""


def _run(run: RunJob, job: CompressionJob) -> CompressionOutcome:
    started = time.perf_counter()
    kept, failure = None, None
    try:
        kept = run(job)
    except Exception as error:
        failure = error
    seconds = time.perf_counter() - started
    return CompressionOutcome(job.request_id, failure, kept, started, seconds)


class SyncExecutor(CompressionExecutor):
    """Runs each compression when it is submitted."""

    def __init__(self, run: RunJob) -> None:
        self._run = run
        self._done: list[CompressionOutcome] = []

    def submit(self, job: CompressionJob) -> None:
        try:
            self._done.append(_run(self._run, job))
        except BaseException as interruption:
            # For example Ctrl-C: the request's cache is half moved, so it must count as failed.
            cause = RuntimeError(f"interrupted by {type(interruption).__name__}")
            self._done.append(CompressionOutcome(job.request_id, cause))
            raise

    def poll(self) -> list[CompressionOutcome]:
        done, self._done = self._done, []
        return done

    def wait(self) -> list[CompressionOutcome]:
        return self.poll()

    def shutdown(self) -> None:
        """There is nothing to wait for."""


_Todo = queue.SimpleQueue[tuple[RunJob, CompressionJob] | None]
_Done = queue.SimpleQueue[CompressionOutcome]


class ThreadExecutor(CompressionExecutor):
    """Runs compressions one by one on a worker thread, concurrently with decoding (CPU).

    The thread ends with `shutdown`, when the executor is garbage-collected, and when the program
    ends: an idle thread holds no reference to the executor or the engine.
    """

    def __init__(self, run: RunJob) -> None:
        self._run = run
        self._todo: _Todo = queue.SimpleQueue()
        self._done: _Done = queue.SimpleQueue()
        self._in_flight = 0
        self._thread = threading.Thread(
            target=_work, args=(self._todo, self._done), name="zipage-compression", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _dismiss, self._todo, self._thread)

    def submit(self, job: CompressionJob) -> None:
        self._todo.put((self._run, job))
        self._in_flight += 1

    def poll(self) -> list[CompressionOutcome]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        self._in_flight -= len(done)
        return done

    def wait(self) -> list[CompressionOutcome]:
        if not self._in_flight:
            return []
        while True:
            try:
                first = self._done.get(timeout=_LIVENESS_INTERVAL)
                break
            except queue.Empty:
                if not self._thread.is_alive() and self._done.empty():
                    raise RuntimeError("the compression thread ended") from None
        self._in_flight -= 1
        return [first, *self.poll()]

    def shutdown(self) -> None:
        self._todo.put(None)
        self._thread.join()


def _work(todo: _Todo, done: _Done) -> None:
    with torch.inference_mode():
        while (item := todo.get()) is not None:
            run, job = item
            try:
                outcome = _run(run, job)
            except BaseException as error:  # the outcome is the only way to report it
                outcome = CompressionOutcome(job.request_id, error)
            done.put(outcome)
            del item, run, outcome


def _dismiss(todo: _Todo, thread: threading.Thread) -> None:
    todo.put(None)
    # Torch must not be torn down while a compression runs.
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


@dataclass(frozen=True)
class _OnStream:
    """A compression queued on a CUDA stream between two events."""

    queued: CompressionOutcome
    began: torch.cuda.Event
    ended: torch.cuda.Event


class StreamExecutor(CompressionExecutor):
    """Queues compressions on a CUDA stream of their own; events tell when they have ended."""

    def __init__(self, run: RunJob, device: torch.device) -> None:
        self._run = run
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[_OnStream] = deque()
        self._failed: list[CompressionOutcome] = []

    def submit(self, job: CompressionJob) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The keys and queries the compression reads were written on the current stream.
        self._stream.wait_stream(current)
        interruption: BaseException | None = None
        with torch.cuda.stream(self._stream):
            began.record(self._stream)
            try:
                outcome = _run(self._run, job)
            except BaseException as error:  # for example Ctrl-C: the cache is half moved
                cause = RuntimeError(f"interrupted by {type(error).__name__}")
                outcome, interruption = CompressionOutcome(job.request_id, cause), error
            ended.record(self._stream)
        if outcome.error is not None:
            # Work enqueued before the failure still writes to blocks that are now released.
            current.wait_event(ended)
            self._failed.append(outcome)
            if interruption is not None:
                raise interruption
            return
        self._in_flight.append(_OnStream(outcome, began, ended))

    def _take(self) -> CompressionOutcome:
        """The oldest compression, which has ended."""
        job = self._in_flight.popleft()
        # The blocks are read and written on the current stream from now on.
        torch.cuda.current_stream(self._stream.device).wait_event(job.ended)
        # Both events have happened, so this does not wait.
        milliseconds = job.began.elapsed_time(job.ended)
        return replace(job.queued, seconds=milliseconds / 1000)

    def poll(self) -> list[CompressionOutcome]:
        done, self._failed = self._failed, []
        while self._in_flight and self._in_flight[0].ended.query():  # type: ignore[no-untyped-call]
            done.append(self._take())
        return done

    def wait(self) -> list[CompressionOutcome]:
        done = self.poll()
        if not done and self._in_flight:
            self._in_flight[0].ended.synchronize()
            done = self.poll()
        return done

    def shutdown(self) -> None:
        self._stream.synchronize()


def make_executor(run: RunJob, asynchronous: bool, device: torch.device) -> CompressionExecutor:
    """The executor for a device and mode."""
    if not asynchronous:
        return SyncExecutor(run)
    if device.type == "cuda":
        return StreamExecutor(run, device)
    return ThreadExecutor(run)
