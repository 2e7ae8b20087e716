"""The engine process: an `EngineCore` controlled by messages."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time

from zipage.engine.channel import Channel
from zipage.engine.core import EngineCore
from zipage.engine.core_io import EngineRequest, TokenUpdate
from zipage.engine.messages import (
    Abort,
    Failure,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Reply,
    Shutdown,
    Start,
    StepReport,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from zipage.engine.stats import StepStats
from zipage.errors import ZipageError
from zipage.observe.logs import configure_logging

logger = logging.getLogger(__name__)


class EngineWorker:
    """Carries out messages and runs steps on the main thread, while another one receives.

    The process ends when the other end of the channel is closed, whatever it is doing: it never
    outlives its parent.

    Args:
        channel: connection to the parent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._step_started: float | None = None
        self._steps: list[StepStats] = []
        self._reported = 0.0
        self._queued = 0
        #: Whether something has happened since the last statistics.
        self._stale = False

    def run(self) -> int:
        """Work until told to stop; returns the exit status."""
        threading.Thread(target=self._receive, name="zipage-receive", daemon=True).start()
        start = self._inbox.get()
        assert isinstance(start, Start), start
        if start.log_level is not None:
            configure_logging(start.log_level, "json" if start.log_format == "json" else "text")
        self._interval = start.stats_interval
        try:
            self._core = EngineCore(start.config)
            self._send(Ready(self._core.model_info()))
            while self._carry_out():
                if self._core.has_unfinished:
                    self._step()
        except BaseException as error:
            if not isinstance(error, ZipageError):  # the parent reports user mistakes
                logger.critical("the engine process stops", exc_info=error)
            self._send(Failure(type(error).__name__, str(error)))
            return 1
        try:
            self._core.shutdown()
        except Exception:
            logger.exception("the engine could not be shut down cleanly")
            return 1
        return 0

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                assert frame is not None
                message = decode_to_engine(frame)
                if isinstance(message, Ping):
                    started = self._step_started
                    self._send(Pong(0.0 if started is None else time.perf_counter() - started))
                else:
                    if isinstance(message, Submit):
                        self._prepare(message.request)
                    self._inbox.put(message)
        except EOFError:
            os._exit(0)
        except BaseException:
            logger.critical("the engine process cannot go on receiving", exc_info=True)
            os._exit(1)

    def _prepare(self, request: EngineRequest) -> None:
        """Compile the answer's form on this thread, not between two steps."""
        form = request.params.structured_outputs
        if form is not None:
            with contextlib.suppress(ZipageError):  # reported by `_submit`
                self._core.grammars.compile(form)

    def _carry_out(self) -> bool:
        """Carry out all messages, waiting for one when idle; False to stop."""
        while True:
            idle = not self._core.has_unfinished
            if idle and self._stale and self._inbox.empty():
                self._report([], stats=True)
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if isinstance(message, Submit):
                self._submit(message.request)
            elif isinstance(message, Abort):
                for sequence_id in message.sequence_ids:
                    self._core.abort(sequence_id)
            elif isinstance(message, Shutdown):
                return False
            self._stale = True

    def _submit(self, request: EngineRequest) -> None:
        first = request.sequence_ids[0]
        try:
            self._core.submit(request)
        except Exception as error:
            for sequence_id in request.sequence_ids:
                self._core.abort(sequence_id)
            self._send(Reply(first, type(error).__name__, str(error)))
        else:
            self._send(Reply(first))

    # ------------------------------------------------------------------ steps

    def _step(self) -> None:
        self._step_started = now = time.perf_counter()
        updates = self._core.step()
        self._step_started = None
        self._steps.append(self._core.last_step)
        self._stale = True
        self._report(updates, stats=now - self._reported >= self._interval)

    def _report(self, updates: list[TokenUpdate], stats: bool) -> None:
        queued = self._core.num_waiting
        if not stats:
            if updates or queued != self._queued:
                self._send(StepReport(updates, queued))
        else:
            self._send(StepReport(updates, queued, self._core.stats(), self._steps))
            self._steps = []
            self._reported = time.perf_counter()
            self._stale = False
        self._queued = queued

    def _send(self, message: FromEngine) -> None:
        try:
            self._channel.send(encode(message))
        except OSError:
            os._exit(0)  # the parent has gone


def main() -> None:
    """Run the engine process; the only argument is the descriptor of its socket."""
    # Ctrl-C and a service manager's SIGTERM are for the parent, which says when to stop, perhaps
    # after the running requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = EngineWorker(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking down the interpreter and its libraries takes a second
