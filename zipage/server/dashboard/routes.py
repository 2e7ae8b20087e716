"""/dashboard and /dashboard/events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from zipage import __version__
from zipage.server.dashboard.examples import examples
from zipage.server.dashboard.feed import HISTORY, Feed
from zipage.server.dashboard.page import load_page
from zipage.server.serving import Serving
from zipage.server.streaming import EventStream, event

EVENTS = "/dashboard/events"


class Dashboard:
    """The dashboard of an application.

    Args:
        app: the application to add the routes to.
        serving: the server to show.
    """

    def __init__(self, app: FastAPI, serving: Serving) -> None:
        self._serving = serving
        self._feed = Feed(serving.engine)
        page = load_page()
        headers = {
            "Content-Security-Policy": page.policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

        @app.get("/dashboard", include_in_schema=False)
        async def dashboard() -> Response:
            return Response(page.html, media_type="text/html", headers=headers)

        @app.get(EVENTS, include_in_schema=False)
        async def dashboard_events(request: Request) -> Response:
            return EventStream(self._events(), serving.settings.stall_timeout)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Take samples inside the ``async with`` block."""
        end = self._serving.engine.listen(self._feed.observe)
        task = asyncio.create_task(self._feed.run())
        try:
            yield
        finally:
            end()
            task.cancel()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        hello = await asyncio.to_thread(self._hello)
        # An open page must not delay the server's shutdown.
        feed = self._feed.follow(lambda: self._serving.draining)
        async with contextlib.aclosing(feed) as batches:
            async for samples in batches:
                if hello is not None:
                    yield event({**hello, "samples": samples}, "hello")
                    hello = None
                else:
                    for sample in samples:
                        yield event(sample, "sample")

    def _hello(self) -> dict[str, Any] | None:
        """The values that do not change."""
        serving, config = self._serving, self._serving.engine.config
        return {
            "version": __version__,
            "model": serving.names[0],
            "has_tokenizer": serving.tokenizer is not None,
            "is_chat": getattr(serving.tokenizer, "chat_template", None) is not None,
            "max_model_len": serving.engine.max_model_len,
            "block_size": config.block_size,
            "kv_budget": config.kv_budget,
            "compression": config.compression,
            "window": config.resolved_window if config.compresses else 0,
            "num_sinks": config.num_sinks,
            "max_num_seqs": config.max_num_seqs,
            "history": HISTORY,
            "examples": examples(config),
        }
