"""The parent's side of an engine process: starting it, talking to it, noticing its end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from zipage import errors
from zipage.config import EngineConfig
from zipage.engine.channel import Channel
from zipage.engine.core_io import ModelInfo
from zipage.engine.messages import (
    Failure,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Start,
    ToEngine,
    decode_from_engine,
    encode,
)
from zipage.errors import EngineDeadError
from zipage.observe.logs import logging_in_use

logger = logging.getLogger(__name__)

#: PYTHONPATH holds the parent's paths; the working directory must not be added to them.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from zipage.engine.engine_worker import main; main()"
)
#: Seconds between two heartbeats.
_HEARTBEAT = 1.0
#: Seconds between two reports of statistics while steps run.
_STATS_INTERVAL = 0.1
#: Longest wait for the process to exit after being told to.
_EXIT_SECONDS = 10.0


class DiedWhileStarting(EngineDeadError):
    """The process ended before it was ready."""


class EngineProcess:
    """A child process that runs the engine core.

    It is a fresh interpreter, not a fork, in its own session, so that a terminal's Ctrl-C does not
    reach it. It inherits one end of a socket pair, so no ports or names are needed. It exits when
    the other end is closed: by `stop`, or because the parent ended in any way.

    Args:
        config: the engine's options.
        on_message: called on the receiving thread with every message that this class does not
            handle itself.
        on_death: called once with the cause when the process ends other than by `stop`.
        is_abandoned: polled while the process starts; once it returns True, the start is given up.
        start_timeout: seconds that the start may take.
        heartbeat_timeout: seconds without an answer after which the process counts as dead.
        step_timeout: seconds a step may take before the process counts as dead.

    Raises:
        ZipageError: the engine cannot be started; the same error as in one process.
        DiedWhileStarting: the process ended.
        EngineDeadError: it took too long or was abandoned.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[EngineProcess, FromEngine], None],
        on_death: Callable[[EngineProcess, EngineDeadError], None],
        is_abandoned: Callable[[], bool],
        start_timeout: float,
        heartbeat_timeout: float,
        step_timeout: float,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stopping = False
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._channel = Channel(ours)
        try:
            log_level, log_format = logging_in_use() or (None, "text")
            start = Start(config, log_level, log_format, _STATS_INTERVAL)
            self.model = self._start(encode(start), start_timeout, is_abandoned)
        except BaseException:
            self._channel.close()
            self._reap(0.0)
            raise
        self._threads = [
            threading.Thread(target=self._receive, name="zipage-receive", daemon=True),
            threading.Thread(target=self._transmit, name="zipage-transmit", daemon=True),
        ]

    def begin(self) -> None:
        """Handle messages from now on."""
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process has ended."""
        self._outbox.put(encode(message))

    def stop(self) -> None:
        """Tell the process to end; kill it if it does not."""
        self._stopping = True
        self.send(Shutdown())
        self._outbox.put(None)
        self._reap(_EXIT_SECONDS)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._channel.close()

    # ------------------------------------------------------------------ start and end

    def _start(self, start: bytes, timeout: float, is_abandoned: Callable[[], bool]) -> ModelInfo:
        left = timeout  # not by the clock, as in `_receive_until_end`
        try:
            self._channel.send(start)
            while (frame := self._channel.receive(min(left, _HEARTBEAT))) is None:
                if is_abandoned():
                    self._channel.close()  # tells it to exit
                    raise EngineDeadError(
                        f"the engine was shut down while starting: {self._reap(_EXIT_SECONDS)}"
                    )
                left -= _HEARTBEAT
                if left <= 0:
                    raise EngineDeadError(
                        f"the engine did not start within start_timeout={timeout:g} s; reading a "
                        "large model, or downloading it, may need more"
                    )
        except (OSError, EOFError) as error:
            raise DiedWhileStarting(
                f"the engine process ended while starting: {self._reap(_EXIT_SECONDS)}"
            ) from error
        message = decode_from_engine(frame)
        if isinstance(message, Failure):
            raise error_of(message.kind, message.message)
        assert isinstance(message, Ready), message
        return message.model

    def _reap(self, patience: float) -> str:
        """Wait for the process, or kill it; returns how it ended."""
        try:
            status = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._kill()
            status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-status, f'signal {-status}')}"

    def _kill(self) -> None:
        if self._process.poll() is None:
            # Together with its children, such as a compiler: it leads its own session.
            with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
                os.killpg(self._process.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ threads

    def _transmit(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._channel.send(frame)
            except OSError:
                return  # the receiving thread notices this too

    def _receive(self) -> None:
        try:
            cause = self._receive_until_end()
        except Exception as error:
            logger.exception("a message of the engine process could not be handled")
            self._kill()
            cause = f"{type(error).__name__}: {error}"
        if not self._stopping:
            self._outbox.put(None)
            self._channel.close()
            ended = self._reap(_HEARTBEAT)
            self._on_death(self, EngineDeadError(f"the engine stopped: {cause or ended}"))

    def _receive_until_end(self) -> str | None:
        """Handle messages; returns why no more are expected, None for the end of the process."""
        # Not by the clock: a parent that was stopped for a while must not blame its child.
        silent = 0
        while True:
            try:
                frame = self._channel.receive(_HEARTBEAT)
            except (EOFError, ValueError, OSError):
                return None
            if frame is None:
                silent += 1
                if silent * _HEARTBEAT > self._heartbeat_timeout:
                    self._kill()
                    return f"no sign of life for {self._heartbeat_timeout:g} s"
                self.send(Ping())
                continue
            silent = 0
            message = decode_from_engine(frame)
            if isinstance(message, Pong):
                if message.step_seconds > self._step_timeout:
                    self._kill()
                    return f"a step took longer than {self._step_timeout:g} s"
            elif isinstance(message, Failure):
                return f"{message.kind}: {message.message}"
            else:
                self._on_message(self, message)


def error_of(kind: str, message: str) -> Exception:
    """The exception an engine process reported: Zipage's own classes, RuntimeError for others."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.ZipageError):
        return found(message)
    return RuntimeError(f"{kind}: {message}")
