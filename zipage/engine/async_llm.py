"""Asyncio use: `AsyncLLM` runs the engine on a thread of its own and streams outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from zipage.config import EngineConfig
from zipage.engine.client import AsyncOutputStream, EngineClient, StepListeners, wake
from zipage.engine.engine import LLMEngine, Prompt
from zipage.engine.stats import EngineStats
from zipage.errors import EngineDeadError, ModelError, RequestError
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

#: Longest wait for a running step when an `AsyncLLM` is dropped or the program ends.
_JOIN_SECONDS = 10.0

#: Unread outputs kept for a slow reader.
_UNREAD = 64


class AsyncLLM(EngineClient):
    """The engine on a thread, for asyncio programs. Methods may be called from any event loop and
    thread.

    Only the engine thread touches the engine: submissions and aborts are commands to it, carried
    out between two steps. The thread ends with `shutdown`, when the `AsyncLLM` is
    garbage-collected, or when the program ends.

    Args:
        model: local Hugging Face directory or hub id; None for the embedded zipage-tiny.
        on_step: called on the engine's thread after every step, with `EngineStats` whose
            `last_step` says what happened in it. It must be quick and must not raise: if it does,
            that is logged and it is not called again.
        max_queued_requests: see `EngineClient`.
        **options: any option of `EngineConfig`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_step: Callable[[EngineStats], None] | None = None,
        max_queued_requests: int | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options({"model": model, **options})
        super().__init__(config, max_queued_requests, on_step, _UNREAD)
        self.engine = LLMEngine(self.config)
        # Neither the thread nor a command refers to this object, so that it can be collected.
        self._loop = _EngineLoop(self.engine, self._listeners)
        self._stopped = False
        #: Orders submissions before the stop command, so that none is left unanswered.
        self._submission = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run, name="zipage-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, _dismiss, self._loop, self._thread)

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        priority: int,
        cache_salt: str,
        stream: AsyncOutputStream,
        final_only: bool,
    ) -> Callable[[], None]:
        loop = self._loop
        accepted = False
        if getattr(params, "structured_outputs", None) is not None:
            # On another thread, so that the engine's goes on. `submit` reports what is refused.
            with contextlib.suppress(RequestError, ModelError):
                await asyncio.to_thread(loop.engine.inputs.prepare, params)

        def submit() -> None:
            try:
                loop.engine.add_request(
                    prompt, params, name, priority, stream=not final_only, cache_salt=cache_salt
                )
            except Exception as error:
                stream.fail(error)
                wake([stream])
                return
            nonlocal accepted
            accepted = True
            loop.listeners[name] = stream

        def withdraw() -> None:
            if accepted and loop.listeners.get(name) is stream:
                del loop.listeners[name]
                loop.engine.abort(name)

        with self._submission:
            if not self.is_running:
                raise self._death or EngineDeadError("the engine was shut down")
            loop.commands.put(submit)
        return lambda: loop.commands.put(withdraw)

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with finish reason ``abort``."""
        loop = self._loop

        def command() -> None:
            output = loop.engine.abort(request_id)
            if output is not None:
                loop.deliver(output)

        loop.commands.put(command)

    def stats(self) -> EngineStats:
        """Counters, gauges and what happened in the last step, as of the end of that step."""
        return self._loop.stats

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return not self._stopped and not self._draining and self._loop.error is None

    @property
    def _num_queued(self) -> int:
        return self._loop.num_queued

    @property
    def _death(self) -> EngineDeadError | None:
        error = self._loop.error
        return None if error is None else _dead(error)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids the model has logits for."""
        return self.engine.vocab_size

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling options the model asks for, see `LLM.get_default_sampling_params`."""
        return self.engine.inputs.model.default_sampling

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.engine.tokenizer

    def shutdown(self) -> None:
        """Stop the engine; running requests end with finish reason ``abort``."""
        with self._submission:
            first = not self._stopped
            self._stopped = True
        if first:
            self._loop.commands.put(None)
        self._thread.join()


class _EngineLoop:
    """What the engine's thread does: carry out commands, run steps, deliver outputs.

    Attributes:
        engine: touched by this thread only.
        commands: called in order between two steps; None ends the loop.
        listeners: by request id.
        stats: as of the last step or command.
        num_queued: waiting answers after the last step.
        error: the failure that stopped the engine, if one did.
    """

    def __init__(self, engine: LLMEngine, step_listeners: StepListeners) -> None:
        self.engine = engine
        self._step_listeners = step_listeners
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.listeners: dict[str, AsyncOutputStream] = {}
        self.stats = engine.stats()
        self.num_queued = 0
        self.error: BaseException | None = None
        self._told_to_stop = False

    def run(self) -> None:
        """Work until told to stop."""
        try:
            while self._carry_out():
                if self.engine.has_unfinished:
                    outputs = self.engine.step()
                    self.num_queued = self.engine.core.num_waiting
                    for output in outputs:
                        self.deliver(output)
                    self.stats = self.engine.stats()
                    self._step_listeners.tell(self.stats)
            for request_id in list(self.listeners):
                last = self.engine.abort(request_id)
                if last is not None:
                    self.deliver(last)
        except BaseException as error:
            logger.critical("the engine thread ended", exc_info=error)
            self.error = error
            self.engine.kill(error)
            # Reporting may be what failed: streams without a last output get the error below.
            with contextlib.suppress(Exception):
                for output in self.engine.fail_all(error.__cause__ or error):
                    self.deliver(output)
            for listener in self.listeners.values():
                listener.fail(_dead(error))
            wake(self.listeners.values())
            self.listeners.clear()
            self._refuse_commands()
        finally:
            try:
                self.engine.shutdown()
            except Exception:
                logger.exception("the engine could not be shut down cleanly")

    def _carry_out(self) -> bool:
        """Carry out all commands, waiting for one when idle; False to stop."""
        while True:
            try:
                command = self.commands.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                self._told_to_stop = True
                return False
            command()
            del command  # it refers to a caller's event loop
            self.stats = self.engine.stats()

    def _refuse_commands(self) -> None:
        """After a failure: every later submission is refused by the dead engine."""
        while not self._told_to_stop:
            command = self.commands.get()
            self._told_to_stop = command is None
            if command is not None:
                with contextlib.suppress(Exception):
                    command()

    def deliver(self, output: RequestOutput) -> None:
        """Hand an output to the stream of its request."""
        listener = self.listeners.get(output.request_id)
        if listener is not None:
            if output.finished:
                del self.listeners[output.request_id]
            listener.put(output)
            wake([listener])


def _dead(error: BaseException) -> EngineDeadError:
    """The error that callers get after `error` stopped the engine."""
    if isinstance(error, EngineDeadError):
        return EngineDeadError(str(error))
    return EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")


def _dismiss(loop: _EngineLoop, thread: threading.Thread) -> None:
    loop.commands.put(None)
    # Torch must not be torn down while a step runs.
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
