"""Middleware around every request: ids, access log, API keys and limits. Plain ASGI, so that
streams and disconnections pass through untouched."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zipage.server.errors import ApiError
from zipage.server.streaming import ClientDisconnected

access_logger = logging.getLogger("zipage.server.access")
logger = logging.getLogger(__name__)

#: Longer client ids, or ones with other characters, are replaced.
_LEGAL_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
#: Status logged for a request whose client disconnected, as in nginx.
_CLIENT_CLOSED = 499

#: Paths that require an API key, with all paths below them.
_PROTECTED = ("/v1", "/tokenize", "/detokenize", "/dashboard/events")


def is_protected(path: str) -> bool:
    """Whether a path requires an API key, if any are set."""
    return any(_within(path, start) for start in _PROTECTED)


def _within(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


class RequestScope:
    """Gives every request an id, logs it, and answers 500 if a handler fails.

    The id is the client's ``X-Request-Id`` if it sent a legal one.

    Args:
        app: handles requests.
        answered: called for every request with its method, the path of its route and the status.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[str, str, int], None]) -> None:
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given.decode() if _LEGAL_ID.fullmatch(given) else uuid.uuid4().hex
        scope["zipage.request_id"] = request_id
        begun, status, is_complete = time.perf_counter(), 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            status = _CLIENT_CLOSED
        except Exception:
            fields = {"request_id": request_id}
            logger.exception("%s %s failed", scope["method"], scope["path"], extra=fields)
            if status:
                raise
            message = f"internal error; the server's log has the details ({request_id})"
            await ApiError(500, message).response()(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begun
            if status and not is_complete:
                status = _CLIENT_CLOSED
            self._answered(scope["method"], _route_of(scope), status)
            client = scope.get("client")
            access_logger.info(
                "%s %s %d in %.1f ms",
                scope["method"],
                scope["path"],
                status,
                1000 * seconds,
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(seconds, 6),
                    "client": client[0] if client else None,
                },
            )


class ApiKeys:
    """Requires one of several API keys on protected paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and is_protected(scope["path"]):
            scheme, _, key = _header(scope, b"authorization").partition(b" ")
            # All keys are compared, in constant time, so that timing reveals nothing.
            matches = [hmac.compare_digest(key.strip(), legal) for legal in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                await ApiError(401, message, headers=headers).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies over a limit as soon as they exceed it."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._limit):
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes (--max-body-size)"
        return ApiError(413, message, headers={"Connection": "close"})


def _route_of(scope: Scope) -> str:
    """The path template of the route, not the client's path, so that there are few."""
    route: Any = scope.get("route")
    path: str | None = getattr(route, "path_format", None)
    return path or next((start for start in _PROTECTED if _within(scope["path"], start)), "other")


def _header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found
