"""Frames over a socket between two processes: a four-byte length, then that many bytes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import weakref

_HEADER = struct.Struct("<I")
_CHUNK = 1 << 18
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_copies() -> None:
    """In a fork: an end held open there would outlive its owner, and its peer would wait for it."""
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_close_copies)


class Channel:
    """One end of a stream socket. Any thread may send, one receives. It is closed in forks.

    Args:
        end: a connected stream socket, which the channel takes over.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        _open.add(end)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Send a frame, waiting for room.

        Raises:
            OSError: the other end is closed.
        """
        with self._sending:
            self._socket.sendall(_HEADER.pack(len(frame)) + frame)

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next frame; None if `timeout` seconds pass without a byte before it is complete.

        Raises:
            EOFError: the other end is closed.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            if not self._poll.poll(None if timeout is None else 1000 * timeout):
                return None
            try:
                chunk = self._socket.recv(_CHUNK)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not chunk:
                raise EOFError("the other end is closed")
            self._buffer += chunk

    def _take(self) -> bytes | None:
        buffer, start = self._buffer, _HEADER.size
        if len(buffer) < start:
            return None
        end = start + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return None
        frame = bytes(memoryview(buffer)[start:end])
        del buffer[:end]
        return frame

    def close(self) -> None:
        """Close this end; `receive` at the other end raises EOFError."""
        with contextlib.suppress(OSError):  # the other end may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
