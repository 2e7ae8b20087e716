"""Listening: sockets, uvicorn, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from zipage.engine.client import EngineClient
from zipage.errors import ConfigError
from zipage.server.app import create_app
from zipage.server.serving import Serving
from zipage.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
#: Seconds an idle connection is kept: longer than clients and proxies keep it (5 to 60), so that
#: none of them sends a request just as the server closes it.
_KEEP_ALIVE = 75
#: Open files requested, within the hard limit: every connection is one.
_OPEN_FILES = 65536
#: Seconds to notify the clients whose requests are aborted when the drain ends.
_FAREWELL = 2
#: Seconds between looks for a second Ctrl-C during the drain.
_TICK = 0.1


class _Server(uvicorn.Server):
    """Announces when it listens, refuses new work while it drains, and stops with the engine."""

    def __init__(
        self, config: uvicorn.Config, serving: Serving, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._serving, self._announce = serving, announce
        self._hurried = self.died = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._serving.draining = True
        if self.should_exit and sig == signal.SIGINT and not self._hurried:
            self._hurried = True  # uvicorn would cut off all connections without a word
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, seconds = asyncio.get_running_loop(), self._serving.settings.drain_timeout
        running = set(self.server_state.tasks)
        logger.info("draining %d requests, for at most %g s", len(running), seconds)
        # uvicorn's own drain closes the sockets first. As long as they are open, new requests and
        # load balancers' probes get 503.
        deadline = loop.time() + seconds
        while running and not self._hurried and (left := deadline - loop.time()) > 0:
            _, running = await asyncio.wait(running, timeout=min(left, _TICK))
        if self._hurried:
            logger.warning("interrupted again: %d requests are aborted", len(running))
        if running:
            # Their clients get an error before uvicorn cuts them off.
            loop.run_in_executor(None, self._serving.engine.shutdown)
        # Clients that read slowly may not have all of an answer yet.
        left = 0.0 if self._hurried else max(deadline - loop.time(), 0.0)
        self.config.timeout_graceful_shutdown = math.ceil(left) + _FAREWELL
        self._hurried = True
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then leaves this out, and logs a traceback of its absence
            await self.lifespan.shutdown()

    async def main_loop(self) -> None:
        watch = asyncio.create_task(self._stop_with_engine())
        try:
            await super().main_loop()
        finally:
            watch.cancel()

    async def _stop_with_engine(self) -> None:
        error = await self._serving.engine.wait_dead()
        logger.critical("the server stops: %s", error)
        self._serving.draining = True  # ends the dashboard's streams, too
        self.died = self.should_exit = True


def check_listening(settings: ServerSettings) -> None:
    """Check that `run_server` could listen, before a model is loaded, which may take minutes.

    Raises:
        ConfigError: as `run_server`.
    """
    _check_certificate(settings)
    with _listening(settings):
        pass


def _check_certificate(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Without any password OpenSSL asks for one on the terminal.
    password = settings.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile={settings.ssl_certfile!r}, ssl_keyfile={settings.ssl_keyfile!r} can't "
            f"be used: no PEM certificate and its private key, or ssl_keyfile_password is missing "
            f"or wrong ({error})"
        ) from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_ca_certs={settings.ssl_ca_certs!r} can't be used: {error}"
            ) from None


def run_server(
    engine: EngineClient, settings: ServerSettings, announce: Callable[[str], None]
) -> int:
    """Serve until told to stop; returns the exit code.

    Args:
        engine: answers; it is shut down at the end.
        settings: the server's options.
        announce: called with a line that has the URL once the server listens.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate cannot be used.
    """
    _raise_limit_of_open_files()
    try:
        with _listening(settings) as (listener, url):
            app = create_app(engine, settings)
            serving: Serving = app.state.serving
            config = _uvicorn_config(app, settings)
            names = ", ".join(serving.names)
            pages = f"API: {url}/v1" + (
                f", dashboard: {url}/dashboard" if settings.dashboard else ""
            )
            server = _Server(
                config, serving, lambda: announce(f"Zipage serves {names} at {url} ({pages})")
            )
            # Objects that exist now will stay: exempt them from garbage collections, which would
            # otherwise stop all requests for some tenths of a second each time.
            gc.collect()
            gc.freeze()
            with _stopped_by_signals(server):
                server.run(sockets=[listener])
    finally:
        engine.shutdown()
    logger.info("stopped")
    return 1 if server.died else 0


def _raise_limit_of_open_files() -> None:
    # The usual limit is 1024, and at the limit a server accepts no connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    for handler in logging.getLogger("zipage").handlers:
        logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _check_certificate(settings)

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn cancels what still runs after the farewell, and logs a traceback of each.
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    config = uvicorn.Config(
        quiet,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=2 if settings.ssl_ca_certs else 0,
    )
    config.load()
    return config


@contextlib.contextmanager
def _listening(settings: ServerSettings) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL."""
    scheme = "https" if settings.ssl_certfile else "http"
    if settings.uds is not None:
        with _unix_socket(settings.uds) as listener:
            yield listener, f"{scheme}+unix://{settings.uds}"
        return
    host = settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{settings.port}: {error}") from None
    with contextlib.closing(listener):
        # Otherwise a response's second write (a body, a token) waits 40 ms for the client to
        # acknowledge the first; asyncio sets this only on sockets it made. Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = f"[{host}]" if ":" in host else host
        yield listener, f"{scheme}://{shown}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        try:
            if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                    # A socket that nobody listens on was left by a server that was killed.
                    if probe.connect_ex(path) != 0:
                        os.unlink(path)
            listener.bind(path)
            os.chmod(path, 0o660)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"can't listen on uds={path!r}: {error}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def _stopped_by_signals(server: _Server) -> Iterator[None]:
    """Stop on signals even before uvicorn handles them itself. When it has stopped, uvicorn raises
    the signals it received again; they have no further effect."""
    handled = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, server.handle_exit) for number in handled}
    except ValueError:  # not the main thread, where uvicorn handles none
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
