"""One streaming request to an OpenAI-compatible server, and when its tokens arrived."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zipage.bench.arrivals import ServingRequest
from zipage.errors import ConfigError

if TYPE_CHECKING:
    import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: Most characters kept of an error's text.
_MOST_DETAIL = 300


@dataclass(frozen=True)
class Endpoint:
    """Where and how requests are sent.

    Attributes:
        url: URL of the server, without ``/v1``.
        path: ``/v1/completions`` or ``/v1/chat/completions``.
        model: name of the model.
        body: fields of every request's body besides prompt, length and streaming.
        headers: headers of every request.
        timeout: most seconds from sending a request to its end.
    """

    url: str
    path: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0

    def encode(self, request: ServingRequest) -> bytes:
        """The body to post."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.path == CHAT else "prompt": request.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.output_len is not None:
            body["max_tokens"] = request.output_len
        return json.dumps({**body, **self.body}).encode()


@dataclass
class Exchange:
    """The course of a request. Times are seconds on `time.perf_counter`'s clock.

    Attributes:
        request: the request.
        intended: when it was scheduled to be sent. Latencies count from here.
        sent: when it was sent.
        ended: when the last byte, or the failure, arrived.
        chunk_times: when each chunk with new text arrived.
        chunk_tokens: tokens generated up to each chunk, if the server reports them.
        prompt_tokens, output_tokens: from the server's usage; None if it reports none.
        failure: None if the answer is complete, else the kind of failure.
        detail: more about the failure.
    """

    request: ServingRequest
    intended: float
    sent: float = 0.0
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None
    detail: str = ""

    @property
    def tokens(self) -> int:
        """Tokens generated; without usage the number of chunks, each of at least one token."""
        return len(self.chunk_times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.chunk_times[0] - self.intended

    @property
    def e2el(self) -> float:
        """End-to-end latency, to the last token."""
        return self.chunk_times[-1] - self.intended

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None if there is only one."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    def inter_token_latencies(self) -> list[tuple[float, float]]:
        """Time per token and the number of tokens, for each chunk after the first.

        A chunk's tokens share the time since the previous chunk. If the server does not report
        how many there are, every chunk gets an equal share of the answer's tokens.
        """
        chunks = len(self.chunk_times)
        even = max(1.0, self.tokens / chunks) if chunks else 1.0
        latencies = []
        for i in range(1, chunks):
            now, before = self.chunk_tokens[i], self.chunk_tokens[i - 1]
            count = even if now is None or before is None else max(1, now - before)
            gap = self.chunk_times[i] - self.chunk_times[i - 1]
            latencies.append((gap / count, float(count)))
        return latencies


class _Failed(Exception):
    """The answer is not as expected; has the kind of failure and details."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class Connections:
    """HTTP clients of one connection each, reused in turn. Closed on leaving ``async with``.

    A single httpx client searches all its connections whenever one is taken or returned: with
    hundreds of streams, that search would be measured.

    Raises:
        ConfigError: httpx is missing.
    """

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError(
                "the benchmark of a server needs httpx: pip install 'zipage[serve]'"
            ) from None
        self._certificates = httpx.create_ssl_context(trust_env=False)
        self._all: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """A client for exclusive use."""
        client = self._free.pop() if self._free else self._new()
        try:
            yield client
        finally:
            self._free.append(client)

    def _new(self) -> httpx.AsyncClient:
        import httpx

        # Proxies set in the environment would be measured too.
        client = httpx.AsyncClient(timeout=None, trust_env=False, verify=self._certificates)
        self._all.append(client)
        return client

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._all:
            await client.aclose()


async def first_model(connections: Connections, url: str, headers: Mapping[str, str]) -> str:
    """Name of the first model that a server lists.

    Raises:
        ConfigError: the server doesn't answer with a list of models.
    """
    import httpx

    try:
        with connections.one() as client:
            answer = await client.get(f"{url}/v1/models", headers=dict(headers), timeout=30)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.ConnectError as e:
        raise ConfigError(
            f"url={url!r} cannot be reached ({e}): does a server run there?"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as e:
        reason = f"{type(e).__name__}: {e}".rstrip(": ")
        raise ConfigError(f"url={url!r} doesn't list its models ({reason}): give --model") from None


async def send(
    connections: Connections,
    endpoint: Endpoint,
    request: ServingRequest,
    content: bytes,
    intended: float,
) -> Exchange:
    """Send a request and read its answer to the end; failures are part of the result.

    Args:
        connections: connections to the server.
        endpoint: where to send it.
        request: the request.
        content: the request as encoded in advance by `Endpoint.encode`.
        intended: when it is scheduled to be sent, on `time.perf_counter`'s clock.
    """
    import httpx

    exchange = Exchange(request, intended)
    exchange.sent = time.perf_counter()
    try:
        with connections.one() as client:
            reading = _exchange(client, endpoint, content, exchange)
            await asyncio.wait_for(reading, endpoint.timeout)
    except _Failed as failed:
        exchange.failure, exchange.detail = failed.kind, failed.detail
    except (TimeoutError, asyncio.TimeoutError):
        exchange.failure = "timeout"
        exchange.detail = f"not finished after {endpoint.timeout:g} s"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        exchange.failure, exchange.detail = "no connection", str(error)
    except httpx.RequestError as error:
        exchange.failure = "disconnected"
        exchange.detail = f"{type(error).__name__}: {error}"
    exchange.ended = time.perf_counter()
    return exchange


async def _exchange(
    client: httpx.AsyncClient, endpoint: Endpoint, content: bytes, exchange: Exchange
) -> None:
    import httpx

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    async with client.stream(
        "POST",
        endpoint.url + endpoint.path,
        content=content,
        headers={**headers, **endpoint.headers},
    ) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise _Failed(f"HTTP {answer.status_code}", text[:_MOST_DETAIL])
        kind = answer.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise _Failed("not a stream", f"content type {kind or 'missing'}")
        reader = _StreamReader(exchange)
        try:
            # To the very end, so that the connection can be reused.
            async for piece in answer.aiter_bytes():
                reader.feed(piece, time.perf_counter())
        except httpx.RequestError:
            if not reader.done:
                raise
    reader.finish()


class _StreamReader:
    """Parses server-sent events from bytes that arrive in arbitrary pieces."""

    def __init__(self, exchange: Exchange) -> None:
        self.done = False
        self._exchange = exchange
        self._ended = False
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes, now: float) -> None:
        """Take bytes that arrived at `now`."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                self._take(event, now)

    def finish(self) -> None:
        """The stream has ended."""
        if not self.done and not self._ended:
            raise _Failed("disconnected", "the stream ended before the answer")
        if not self._exchange.chunk_times:
            raise _Failed("empty answer", "the stream had no text")

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise _Failed("error in the stream", str(chunk["error"])[:_MOST_DETAIL])
            usage = chunk.get("usage")
            generated = None
            if usage:
                generated = int(usage["completion_tokens"])
                self._exchange.output_tokens = generated
                self._exchange.prompt_tokens = int(usage["prompt_tokens"])
            for choice in chunk.get("choices") or ():
                self._ended |= choice.get("finish_reason") is not None
                if _has_text(choice):
                    self._exchange.chunk_times.append(now)
                    self._exchange.chunk_tokens.append(generated)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise _Failed(
                "malformed chunk", event.decode(errors="replace")[:_MOST_DETAIL]
            ) from None


def _has_text(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(kind) for kind in kinds)
