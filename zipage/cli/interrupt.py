"""Ctrl-C without half-finished work or a traceback."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The signal that asked to stop, if any did."""

    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of a program stopped by that signal."""
        return 128 + (self.signal or 0)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While active, the first SIGINT or SIGTERM is only noted; the next one acts as usual.

    Outside the main thread, where handlers can't be set, nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()


@contextlib.contextmanager
def die_on_interrupt() -> Iterator[None]:
    """While active, SIGINT ends the process at once, as nothing is worth saving yet.

    A KeyboardInterrupt while torch is being imported is swallowed by one of its optional imports
    and comes out as an unrelated ImportError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
