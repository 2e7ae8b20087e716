"""What a server needs of an engine, and what the engine on a thread and the one in a process share:
streams of outputs, the limit of the queue, timeouts, the end.
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

#: Seconds between two looks at whether something has come to its end.
_POLL = 0.05


class AsyncOutputStream:
    """Outputs of one request on their way to the coroutine that reads them.

    Outputs say all that was generated so far, so that the oldest unread one can be dropped when
    there are `capacity` of them: a reader that is slow, or never comes, costs no memory and holds
    nobody up.

    Args:
        capacity: most unread outputs.
        answers: how many answers the request asks for.
        live: the streams whose request has not ended, of which this is one until it ends.
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
        """Take an output. For any thread; the reader is told by `wake`."""
        self._outputs.append(output)
        if output.finished:
            self._live.discard(self)

    def fail(self, error: BaseException) -> None:
        """Let the reader have an error instead of any further output. For any thread, as `put`."""
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
    """Tell the readers of streams that something is there. For any thread."""
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
        """Tell `listener` of every step from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._remove(listener)

    def tell(self, stats: EngineStats) -> None:
        """Tell all of a step."""
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
    """An engine for asyncio programs: `AsyncLLM` or `EngineProcessClient`. What a server is
    written against. Methods may be called from any event loop and thread.

    Args:
        config: the engine's options.
        max_queued_requests: refuse a request while so many answers wait for blocks or for their
            turn, or when so many more than `max_num_seqs` are under way; None for no limit.
        on_step: called after every step, see `listen`.
        unread: most outputs kept for a reader that is slow.

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
        """Call a function for every step from now on, as the `on_step` of the constructors;
        returns what ends that."""
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
            RequestTimeoutError: `timeout` is over.
            EngineDeadError: the engine failed or was shut down, or this is a fork of its process.
        """
        if os.getpid() != self._pid:  # its threads are not here, and nobody would answer
            raise EngineDeadError(
                f"the engine belongs to process {self._pid}, of which this one is a fork: make "
                "another engine here"
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
        # The last step is the latest news of who waits; those who came since may run at once.
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
        """Wait until the engine has failed for good; returns why. For a server that exits then."""
        while (error := self._death) is None or not self._is_final:
            await asyncio.sleep(_POLL)
        return error

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, let the running ones finish, and stop.

        Args:
            timeout: seconds after which those that still run are aborted; None for no limit.
        """
        self._draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._live and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self.shutdown)

    # ------------------------------------------------------------------ of the engine behind it

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
        """Counters, gauges and what happened in the last step, as of then."""

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
        """Queue a request whose outputs go to `stream`; returns what withdraws it, if it runs."""

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
