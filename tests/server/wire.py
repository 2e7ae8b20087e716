"""HTTP over a bare socket, for tests that count what a client reads and when it goes away."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit


class Gone(Exception):
    """The server closed the connection before the answer was complete."""


class Wire:
    """A connection that is kept for further requests.

    Args:
        url: of the server.
        receive_buffer: bytes the kernel keeps for a client that does not read; None for many.
    """

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        place = urlsplit(url)
        self._address = (place.hostname, place.port)
        self._receive_buffer = receive_buffer
        self.reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, path: str, body: bytes | dict[str, Any], request_id: str = "") -> None:
        """Post a body."""
        if self._writer is None:
            own = socket.socket()
            if self._receive_buffer is not None:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
            own.setblocking(False)
            await asyncio.get_running_loop().sock_connect(own, self._address)
            limit = self._receive_buffer or 1 << 16
            self.reader, self._writer = await asyncio.open_connection(sock=own, limit=limit)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: zipage\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: {request_id}\r\n" if request_id else ""
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await self._writer.drain()

    async def answer(self, pause: float = 0.0) -> tuple[int, str]:
        """Read a whole answer, with a `pause` after every chunk: its status and body.

        Raises:
            Gone: it is not complete.
        """
        status, length = await self.head()
        return status, await self.body(length, pause)

    async def head(self) -> tuple[int, int | None]:
        """Read the head of an answer: its status, and the body's length unless it is streamed.

        Raises:
            Gone: it is not complete.
        """
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Gone from error
        _, _, length = head.partition("\r\ncontent-length: ")
        return int(head.split()[1]), int(length.split()[0]) if length else None

    async def body(self, length: int | None, pause: float = 0.0) -> str:
        """Read the body of an answer.

        Raises:
            Gone: it is not complete.
        """
        try:
            if length is not None:
                return (await self.reader.readexactly(length)).decode()
            parts = []
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                parts.append((await self.reader.readexactly(size + 2))[:-2])
                if pause:
                    await asyncio.sleep(pause)
            await self.reader.readexactly(2)
            return b"".join(parts).decode()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Gone from error

    def close(self, abruptly: bool = False) -> None:
        """Close the connection, perhaps with a reset."""
        if self._writer is not None:
            (self._writer.transport.abort if abruptly else self._writer.close)()
            self._writer = None
