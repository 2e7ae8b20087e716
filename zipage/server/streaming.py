"""Server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from zipage.server.errors import ApiError, from_exception

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
#: Serialises dicts without pydantic's checks, which take seconds for a large answer.
encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):
    """The client went away before its answer was complete."""


async def unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnected: the client went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancel(task, gone)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """An event with a JSON object, and with a type if `name` is given."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + encode(data) + b"\n\n"


def stream_error(error: Exception, log_fields: Mapping[str, Any]) -> ApiError:
    """The error a client gets in mid-stream; bugs are logged."""
    answer = from_exception(error)
    if answer is None:
        logger.error("a stream failed", exc_info=error, extra=dict(log_fields))
        answer = ApiError(500, "internal error; the server's log has the details")
    return answer


class EventStream(Response):
    """A stream of events, which ends when the client disconnects.

    Args:
        events: encoded events. The generator is closed when the client goes away, or leaves an
            event unread for `stall_timeout` seconds.
        stall_timeout: see above.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stall_timeout = events, stall_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        work = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped = not work.done()
            await _cancel(work, gone)
        if stopped or work.cancelled():
            raise ClientDisconnected
        work.result()

    async def _send(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        try:
            headers = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **headers})
            async for data in self._events:
                timer = loop.call_later(self._stall_timeout, task.cancel)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                timer.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
