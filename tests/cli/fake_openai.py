"""A server that speaks OpenAI's wire format and behaves as its requests ask for."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


class FakeServer:
    """Its app, and what it saw.

    A request's field ``script`` says what happens: ``first`` and ``gap`` are the seconds before
    the first and every later chunk, ``tokens`` how many each chunk has, ``behave`` what goes
    wrong. Chunks go on until there are ``max_tokens``.

    Attributes:
        bodies: of all requests.
        sent: times at which the chunks of each request were handed to the network.
        serial: answer one request at a time.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.sent: list[list[float]] = []
        self.serial = False
        self._turn = asyncio.Lock()
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._answer)
        self.app.post("/v1/chat/completions")(self._answer)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake-model", "object": "model"}]}

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.sent.append([])
        script = {"first": 0.0, "gap": 0.0, "tokens": 1, "behave": None, **body.get("script", {})}
        match script["behave"]:
            case "refuse":
                error = {"message": "too many requests", "type": "rate_limit", "code": 429}
                return JSONResponse({"error": error}, status_code=429)
            case "json":
                return JSONResponse({"choices": [{"text": "all at once"}]})
            case "hang":
                await asyncio.sleep(30)
        chat = request.url.path.endswith("chat/completions")
        events = self._events(body, script, chat, self.sent[-1])
        return StreamingResponse(events, media_type="text/event-stream; charset=utf-8")

    async def _events(
        self, body: dict[str, Any], script: dict[str, Any], chat: bool, sent: list[float]
    ) -> AsyncIterator[bytes]:
        async with self._turn if self.serial else _nothing():
            behave, generated, wanted = script["behave"], 0, body["max_tokens"]
            if behave == "comments":
                yield b": keep-alive\r\n\r\n"
            if chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            while generated < wanted and behave != "empty":
                await asyncio.sleep(script["gap"] if generated else script["first"])
                if behave == "half" and generated >= wanted / 2:
                    raise RuntimeError("the connection is cut, as the script says")
                if behave == "end" and generated >= wanted / 2:
                    return
                if behave == "garbage" and generated:
                    yield b"data: {not JSON\n\n"
                if behave == "error" and generated:
                    yield _event({"error": {"message": "out of memory", "code": 500}})
                    return
                generated = min(wanted, generated + script["tokens"])
                over = "length" if generated == wanted else None
                text = {"delta": {"content": "x"}} if chat else {"text": "x"}
                chunk = {"choices": [{"index": 0, **text, "finish_reason": over}]}
                if behave == "counts":
                    chunk["usage"] = _usage(body, generated)
                sent.append(time.perf_counter())
                event = _event(chunk)
                if behave == "comments":
                    event = event.replace(b"\n", b"\r\n")
                    yield event[:10]
                    await asyncio.sleep(0.01)
                    event = event[10:]
                yield event
            if behave != "no usage" and body.get("stream_options", {}).get("include_usage"):
                yield _event({"choices": [], "usage": _usage(body, generated)})
            yield b"data: [DONE]\n\n"


class _nothing:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


def _usage(body: dict[str, Any], generated: int) -> dict[str, int]:
    prompt = body.get("prompt") or body["messages"][0]["content"].split()
    return {"prompt_tokens": len(prompt), "completion_tokens": generated}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server on a free port, in a thread."""
    fake = FakeServer()
    config = uvicorn.Config(fake.app, port=0, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{port}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
