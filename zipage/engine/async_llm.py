"""Asyncio use: `AsyncLLM` runs the engine on a thread of its own and streams outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from zipage.config import EngineConfig
from zipage.engine.core import EngineStats
from zipage.engine.engine import LLMEngine, Prompt
from zipage.errors import EngineDeadError
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class _Listener:
    """Where the outputs of one request go."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]

    def put(self, item: RequestOutput | BaseException) -> None:
        # A closed loop means that nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLM:
    """The engine for asyncio programs. Methods may be called from any event loop.

    Only the engine thread touches the engine: submissions and aborts are commands to it, carried
    out between two steps.

    Args:
        model: local Hugging Face directory or hub id; None for the embedded zipage-tiny.
        **options: any option of `EngineConfig`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        self.engine = LLMEngine(self.config)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._stats = self.engine.stats()
        self._error: BaseException | None = None
        self._stopped = False
        #: Orders submissions before the stop command, so that none is left unanswered.
        self._submission = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="zipage-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt; yields the output so far after every new token.

        Leaving the iteration early, or cancelling the task, aborts the request.

        Raises:
            RequestError: the request is refused.
            EngineDeadError: the engine failed or was shut down.
        """
        params = sampling_params or SamplingParams(temperature=0.0)
        name = request_id if request_id is not None else f"async-{uuid.uuid4().hex}"
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        accepted = False

        def submit() -> None:
            try:
                self.engine.add_request(prompt, params, name, priority, stream=True, salt=salt)
            except Exception as error:
                listener.put(error)
                return
            nonlocal accepted
            accepted = True
            self._listeners[name] = listener

        def withdraw() -> None:
            if accepted and self._listeners.get(name) is listener:
                del self._listeners[name]
                self.engine.abort(name)

        with self._submission:
            if not self.is_running:
                raise EngineDeadError("the engine is not running") from self._error
            self._commands.put(submit)
        finished = False
        try:
            while not finished:
                item = await listener.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._commands.put(withdraw)

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with finish reason ``abort``."""

        def command() -> None:
            output = self.engine.abort(request_id)
            if output is not None:
                self._deliver(output)

        self._commands.put(command)

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last step."""
        return self._stats

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return not self._stopped and self._error is None

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.engine.tokenizer

    def shutdown(self) -> None:
        """Stop the engine; running requests end with finish reason ``abort``."""
        with self._submission:
            first = not self._stopped
            self._stopped = True
        if first:
            self._commands.put(None)
            self._thread.join()

    # ------------------------------------------------------------------ the engine's thread

    def _work(self) -> None:
        try:
            while self._carry_out():
                if self.engine.has_unfinished:
                    for output in self.engine.step():
                        self._deliver(output)
                self._stats = self.engine.stats()
            for request_id in list(self._listeners):
                last = self.engine.abort(request_id)
                if last is not None:
                    self._deliver(last)
        except BaseException as error:
            logger.critical("the engine thread ended", exc_info=error)
            self._error = error
            self.engine.kill(error)
            # Reporting may be what failed: whoever gets no last output is told below.
            with contextlib.suppress(Exception):
                for output in self.engine.fail_all(error):
                    self._deliver(output)
            dead = EngineDeadError(f"the engine stopped: {error}")
            for listener in self._listeners.values():
                listener.put(dead)
            self._refuse_commands()
        finally:
            with contextlib.suppress(Exception):
                self.engine.shutdown()

    def _carry_out(self) -> bool:
        """Carry out all commands, waiting for one when idle; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._stats = self.engine.stats()

    def _refuse_commands(self) -> None:
        """After a failure: every later submission is refused by the dead engine."""
        while (command := self._commands.get()) is not None:
            command()

    def _deliver(self, output: RequestOutput) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is not None:
            if output.finished:
                del self._listeners[output.request_id]
            listener.put(output)
