"""The interface a server needs from an engine, and what the engine on a thread and the one in a
process share: output streams, the queue limit, timeouts, shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from zipage.config import EngineConfig, is_real
from zipage.engine.input_processor import Prompt
from zipage.engine.stats import EngineStats
from zipage.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestTimeoutError,
    shown,
)
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

#: Seconds between two polls for the end of something.
_POLL = 0.05


class AsyncOutputStream:
    """Outputs of one request on their way to the coroutine that reads them.

    Each output holds everything generated so far, so the oldest unread one can be dropped when
    there are `capacity` of them: memory stays bounded, and a slow or absent reader holds nobody up.

    Args:
        capacity: most unread outputs.
        answers: how many answers the request asks for.
        live: the streams whose request has not ended; this one is a member until its request ends.
    """

    def __init__(self, capacity: int, answers: int, live: set[AsyncOutputStream]) -> None:
        self.answers = answers
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._outputs: deque[RequestOutput] = deque(maxlen=capacity)
        self._error: BaseException | None = None
        self._live = live
        live.add(self)

    def put(self, output: RequestOutput) -> None:
        """Take an output, from any thread. `wake` notifies the reader."""
        self._outputs.append(output)
        if output.finished:
            self._live.discard(self)

    def fail(self, error: BaseException) -> None:
        """Give the reader an error instead of further outputs. From any thread, like `put`."""
        self._error = error
        self._live.discard(self)

    def close(self) -> None:
        """The reader has gone."""
        self._live.discard(self)

    async def get(self) -> RequestOutput:
        """The next output.

        Raises:
            BaseException: the error given to `fail`, unless the last output came before it.
        """
        while True:
            finished = self._outputs and self._outputs[-1].finished
            if self._error is not None and not finished:
                raise self._error
            if self._outputs:
                return self._outputs.popleft()
            self._ready.clear()
            await self._ready.wait()


def wake(streams: Iterable[AsyncOutputStream]) -> None:
    """Notify the readers of streams of new outputs. From any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[AsyncOutputStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, some in by_loop.items():
        # A closed loop means that nobody listens any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_ready, some)


def _set_ready(streams: list[AsyncOutputStream]) -> None:
    for stream in streams:
        stream._ready.set()


class StepListeners:
    """Functions that are called after every step. One that raises is logged and dropped."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[EngineStats], None]] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: Callable[[EngineStats], None]) -> Callable[[], None]:
        """Call `listener` after every step from now on; returns a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._remove(listener)

    def tell(self, stats: EngineStats) -> None:
        """Call all listeners after a step."""
        for listener in list(self._listeners):
            try:
                listener(stats)
            except Exception:
                logger.exception("on_step failed and is not called again")
                self._remove(listener)

    def _remove(self, listener: Callable[[EngineStats], None]) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)


class EngineClient(ABC):
    """An engine for asyncio programs, `AsyncLLM` or `EngineProcessClient`: the interface the server
    uses. Methods may be called from any event loop and thread.

    Args:
        config: the engine's options.
        max_queued_requests: refuse a request while this many answers wait for blocks or for their
            turn, or while this many more than `max_num_seqs` are in flight; None for no limit.
        on_step: called after every step, see `listen`.
        unread: most outputs kept for a slow reader.

    Attributes:
        queue_refusals: requests refused because too many waited.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_queued_requests: int | None,
        on_step: Callable[[EngineStats], None] | None = None,
        unread: int = 1,
    ) -> None:
        most = max_queued_requests
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(f"max_queued_requests={shown(most)} must be an integer >= 1 or None")
        self.config = config
        self._pid = os.getpid()
        self._max_queued = most
        self._unread = unread
        self._live: set[AsyncOutputStream] = set()
        self._draining = False
        self.queue_refusals = 0
        self._listeners = StepListeners()
        if on_step is not None:
            self._listeners.add(on_step)

    def listen(self, on_step: Callable[[EngineStats], None]) -> Callable[[], None]:
        """Call a function after every step from now on, like the `on_step` of the constructors;
        returns a function that removes it."""
        return self._listeners.add(on_step)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        final_only: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt; yields the output so far after new tokens.

        Tokens that arrive while nobody reads are joined into one output. Leaving the iteration
        early, or cancelling the task, aborts the request.

        Args:
            prompt: text or token ids.
            sampling_params: how to sample; None for `default_sampling`.
            request_id: unique among live requests; made up if None.
            priority: lower runs earlier.
            cache_salt: requests share prefix-cache blocks only with requests of equal salt.
            timeout: seconds after which the request is aborted; None for no limit.
            final_only: yield only the last output, which costs less than all of them.

        Raises:
            RequestError: the request is refused.
            EngineOverloadedError: too many requests wait, see `max_queued_requests`.
            RequestTimeoutError: the request took longer than `timeout`.
            EngineDeadError: the engine failed or was shut down, or this is a fork of its process.
        """
        if os.getpid() != self._pid:  # its threads are not here, and nobody would answer
            raise EngineDeadError(
                f"the engine belongs to process {self._pid}, of which this one is a fork: make "
                "another engine in this process"
            )
        params = sampling_params
        if params is None:
            params = SamplingParams.from_dict(self.default_sampling)
        name = request_id if request_id is not None else f"async-{uuid.uuid4().hex}"
        answers = params.n if isinstance(params, SamplingParams) else 1
        if timeout is not None and not (is_real(timeout) and timeout > 0):
            raise RequestError(f"timeout={shown(timeout)} must be a positive number of seconds")
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")
        self._check_queue(answers)
        stream = AsyncOutputStream(self._unread, answers, self._live)
        withdraw: Callable[[], None] | None = None
        expiry: asyncio.TimerHandle | None = None

        def expire() -> None:
            stream.fail(RequestTimeoutError(f"request {name} took longer than {timeout} s"))
            wake([stream])
            if withdraw is not None:
                withdraw()

        finished = False
        try:
            if timeout is not None:
                expiry = asyncio.get_running_loop().call_later(timeout, expire)
            withdraw = await self._submit(
                prompt, params, name, priority, cache_salt, stream, final_only
            )
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            stream.close()
            if expiry is not None:
                expiry.cancel()
            if withdraw is not None and not finished:
                withdraw()

    def _check_queue(self, answers: int) -> None:
        most = self._max_queued
        if most is None:
            return
        live = sum(stream.answers for stream in list(self._live))
        # Known as of the last step; requests submitted since may run at once.
        waiting = min(self._num_queued, live)
        if waiting >= most or live + answers > self.config.max_num_seqs + most:
            self.queue_refusals += 1
            raise EngineOverloadedError(
                f"{live} answers are under way and {waiting} of them wait: "
                f"max_queued_requests={most} may wait, try again later"
            )

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the engine can answer."""
        error = self._death
        if error is not None:
            raise EngineDeadError(str(error)) from error
        if not self.is_running:
            raise EngineDeadError("the engine is not running")

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has failed for good; returns why. Lets a server exit then."""
        while (error := self._death) is None or not self._is_final:
            await asyncio.sleep(_POLL)
        return error

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, let the running ones finish, and stop.

        Args:
            timeout: seconds after which requests still running are aborted; None for no limit.
        """
        self._draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._live and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self.shutdown)

    # ------------------------------------------------------------------ the engine behind it

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids the model has logits for."""

    @property
    @abstractmethod
    def default_sampling(self) -> dict[str, Any]:
        """Sampling options the model asks for, see `LLM.get_default_sampling_params`."""

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with finish reason ``abort``."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters, gauges and what happened in the last step, as of the end of that step."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop now; running requests end with finish reason ``abort``."""

    @abstractmethod
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
        """Queue a request whose outputs go to `stream`; returns a function that aborts it if it
        has not ended."""

    @property
    @abstractmethod
    def _num_queued(self) -> int:
        """Answers that waited for blocks or for their turn after the last step."""

    @property
    @abstractmethod
    def _death(self) -> EngineDeadError | None:
        """Why the engine does not work; None if it does, or was shut down."""

    @property
    def _is_final(self) -> bool:
        """Whether an engine that does not work will not be restarted."""
        return True
