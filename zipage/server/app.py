"""The application: routes, their requests and their responses."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from zipage import __version__
from zipage.engine.client import EngineClient
from zipage.errors import ZipageError
from zipage.server import chat, completions, responses, tokenization
from zipage.server.dashboard.routes import EVENTS, Dashboard
from zipage.server.document import openapi_document
from zipage.server.errors import (
    ApiError,
    bad_request,
    on_http_exception,
    on_invalid_body,
    on_zipage_error,
    unavailable,
)
from zipage.server.metrics import EXPOSITION_TYPE, ServerMetrics
from zipage.server.middleware import ApiKeys, BodyLimit, RequestScope
from zipage.server.protocol.chat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from zipage.server.protocol.completions import CompletionRequest, CompletionResponse
from zipage.server.protocol.responses import ResponseObject, ResponsesRequest
from zipage.server.protocol.sampling import ErrorResponse
from zipage.server.protocol.system import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from zipage.server.serving import Serving, request_id_of
from zipage.server.settings import ServerSettings

logger = logging.getLogger(__name__)

#: Nesting depth of lists and objects in a body. The libraries for JSON, schemas and templates have
#: limits of their own, the lowest at 128.
_MAX_DEPTH = 100
#: Lists, objects and members of objects in a body. Decoding and checking a million members takes
#: more than a second, in which no other thread runs.
_MAX_PARTS = 1 << 18

#: Bodies of at least this many bytes are decoded on a thread.
_LARGE_BODY = 1 << 20


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (list, dict))
        ]
    return bool(level)


class _JSONRequest(Request):
    """Reads bodies as strict JSON: no NaN, no lone surrogates, no deep nesting."""

    async def json(self) -> Any:
        """The decoded body."""
        body = await self.body()
        if len(body) < _LARGE_BODY:
            return _decode(body)
        return await asyncio.to_thread(_decode, body)


def _decode(body: bytes) -> Any:
    if _num_parts(body) > _MAX_PARTS:
        message = f"the body has more than {_MAX_PARTS} lists, objects and members of objects"
        raise bad_request(None, message, "invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        reason = _lone_surrogate(body) or str(error)
        raise bad_request(None, f"the body is not valid JSON: {reason}", "invalid_json") from None
    # Most bodies have few brackets, but perhaps a million numbers.
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and _is_deep(value):
        message = f"the body is nested more deeply than {_MAX_DEPTH} levels"
        raise bad_request(None, message, "invalid_json")
    return value


def _lone_surrogate(body: bytes) -> str | None:
    """What is wrong with a body that has half a character; the decoder says it was truncated.

    Large bodies are not searched, as nothing else runs meanwhile.
    """
    if len(body) >= _LARGE_BODY:
        return None
    escapes = body.replace(rb"\\", b"__")
    pair = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    found = re.search(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", re.sub(pair, b"", escapes))
    if found is None:
        return None
    return f"a text has the lone surrogate {found[0].decode()}, which is not valid Unicode"


def _num_parts(body: bytes) -> int:
    """Lists, objects and members of objects; if few, their marks inside strings count too."""
    marks = (b"[", b"{", b":")
    most = sum(map(body.count, marks))
    if most <= _MAX_PARTS:
        return most
    text = np.frombuffer(body.replace(rb"\\", b"__").replace(rb"\"", b"__"), np.uint8)
    in_string = np.logical_xor.accumulate(text == ord('"'))
    return sum(int(np.count_nonzero((text == ord(mark)) & ~in_string)) for mark in marks)


class _JSONRoute(APIRoute):
    """A route whose body is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Checks the body's type before FastAPI reads it."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            kind = request.headers.get("content-type", "")
            essence = kind.partition(";")[0].strip().lower()
            is_json = essence == "application/json" or essence.endswith("+json")
            if self.body_field is not None and not is_json:
                message = f"the body is of type {kind!r}: set Content-Type to application/json"
                raise ApiError(415, message)
            encoding = request.headers.get("content-encoding", "identity")
            if self.body_field is not None and encoding.strip().lower() != "identity":
                raise ApiError(415, f"Content-Encoding {encoding!r}: send the body as it is")
            return await handle(_JSONRequest(request.scope, request.receive))

        return handler


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of errors."""
    return {
        status: {"model": ErrorResponse, "description": _DESCRIPTIONS[status]}
        for status in statuses
    }


_DESCRIPTIONS = {
    400: "The request is malformed or asks for something illegal; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are waiting; `Retry-After` says when to come back.",
    500: "A bug, or a failure of this request alone.",
    503: "The engine stopped, or the server is shutting down.",
    504: "The request took longer than the server allows.",
}
_TEXT_ERRORS = (400, 401, 404, 413, 415, 500, 503)
_GENERATION_ERRORS = (*_TEXT_ERRORS, 429, 504)


def _streams(model: type | None, description: str) -> dict[str, Any]:
    """Documentation of a response that is an object or a stream of events."""
    text = {"type": "string"}
    # OpenAPI 3.2's keyword for the schema of each event.
    events = {"type": "object", "properties": {"event": text, "data": text}, "required": ["data"]}
    content: dict[str, Any] = {"text/event-stream": {"itemSchema": events}}
    return {"model": model, "content": content, "description": description}


def create_app(
    engine: EngineClient, settings: ServerSettings | None = None, *, owns_engine: bool = True
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        engine: answers; stopped with the application if it `owns_engine`.
        settings: the server's options.
        owns_engine: whether the engine is shut down with the application.
    """
    settings = settings or ServerSettings()
    serving = Serving(engine, settings)
    metrics = ServerMetrics(engine, serving.names[0])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        app.openapi()  # takes some tenths of a second, which no request should wait for
        async with AsyncExitStack() as stack:
            stack.callback(engine.listen(metrics.observe))
            if dashboard is not None:
                await stack.enter_async_context(dashboard.running())
            yield
        if owns_engine:
            await asyncio.get_running_loop().run_in_executor(None, serving.close)

    app = FastAPI(
        title="Zipage",
        version=__version__,
        description="An OpenAI-compatible API with constant KV memory per request.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = _JSONRoute
    app.state.serving, app.state.metrics = serving, metrics
    app.openapi = functools.cache(  # type: ignore[method-assign]
        lambda: openapi_document(app, serving)
    )
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(ZipageError, on_zipage_error)
    _add_generation(app, serving)
    _add_tokens(app, serving)
    _add_system(app, serving)
    _add_metrics(app, metrics)
    dashboard = Dashboard(app, serving) if settings.dashboard else None
    _add_head(app)
    # The last middleware added is the first to see a request.
    app.add_middleware(BodyLimit, limit=settings.body_limit)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestScope, answered=metrics.answered)
    return app


def _add_generation(app: FastAPI, serving: Serving) -> None:
    def log(request: Request, body: Any) -> None:
        if serving.settings.log_prompts:
            fields = {
                "request_id": request_id_of(request),
                "body": body.model_dump(exclude_none=True),
            }
            text = "request %s: %s"
            logger.info(text, fields["request_id"], fields["body"], extra=fields)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses={
            200: _streams(CompletionResponse, "The texts, or a stream of pieces of them."),
            **_errors(*_GENERATION_ERRORS),
        },
    )
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts."""
        log(request, body)
        return await completions.complete(serving, request, body)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses={
            200: _streams(ChatCompletionResponse, "The answers, or a stream of pieces of them."),
            **_errors(*_GENERATION_ERRORS),
        },
    )
    async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        log(request, body)
        return await chat.chat(serving, request, body)

    @app.post(
        "/v1/responses",
        response_model=None,
        responses={
            200: _streams(ResponseObject, "The response, or a stream of events."),
            **_errors(*_GENERATION_ERRORS),
        },
    )
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        """Respond to text."""
        log(request, body)
        return await responses.respond(serving, request, body)


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", response_model=TokenizeResponse, responses=_errors(*_TEXT_ERRORS))
    async def tokenize(request: Request, body: Annotated[TokenizeRequest, Body()]) -> Response:
        """Token ids of a text or a conversation."""
        return JSONResponse(await tokenization.tokenize(serving, request, body))

    @app.post("/detokenize", response_model=DetokenizeResponse, responses=_errors(*_TEXT_ERRORS))
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return JSONResponse(await tokenization.detokenize(serving, request, body))


def _add_system(app: FastAPI, serving: Serving) -> None:
    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        if serving.settings.dashboard:
            return RedirectResponse("/dashboard")
        paths = {"models": "/v1/models", "health": "/health", "document": "/openapi.json"}
        return JSONResponse({"name": "zipage", "version": __version__, **paths})

    def card(name: str) -> dict[str, Any]:
        limit = serving.engine.max_model_len
        return ModelCard(
            id=name, created=serving.created, root=serving.root, max_model_len=limit
        ).model_dump()

    @app.get("/v1/models", response_model=ModelList, responses=_errors(401, 500))
    async def list_models() -> Response:
        """All names of the model."""
        return JSONResponse({"object": "list", "data": [card(name) for name in serving.names]})

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=_errors(401, 404, 500))
    async def get_model(model: str) -> Response:
        """One name of the model."""
        return JSONResponse(card(serving.check_model(model)))

    @app.get("/health", response_model=Health, responses=_errors(500, 503))
    async def health() -> Response:
        """Whether requests are accepted."""
        if not serving.engine.is_running:
            raise unavailable("the engine stopped")
        if serving.draining:
            raise unavailable("the server is shutting down")
        return JSONResponse({"status": "ok"})

    @app.get("/version", response_model=Version, responses=_errors(500))
    async def version() -> Response:
        """Zipage's version."""
        return JSONResponse({"version": __version__})


def _add_head(app: FastAPI) -> None:
    """Answers HEAD like GET, for load balancers that probe with it; uvicorn omits the body."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and route.path != EVENTS:
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                response_model=None,
                include_in_schema=False,
            )


def _add_metrics(app: FastAPI, metrics: ServerMetrics) -> None:
    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"description": "Prometheus's text format."}, **_errors(500)},
    )
    async def prometheus_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.exposition(), headers={"Content-Type": EXPOSITION_TYPE})
