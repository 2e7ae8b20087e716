"""Requests in the engine, and what each of their outputs adds to the previous one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from zipage.engine.client import EngineClient
from zipage.outputs import CompletionOutput, CompressionRecord, Logprob, RequestOutput
from zipage.sampling_params import SamplingParams
from zipage.server.errors import ApiError, unavailable
from zipage.server.structured import RequestedForm


@dataclass
class Job:
    """One prompt for the engine.

    Attributes:
        request_id: what the engine calls it.
        text: the prompt's text, if it was given as text.
        token_ids: the prompt.
        params: how to sample.
        priority: lower runs earlier.
        cache_salt: requests share prefix-cache blocks only with requests of equal salt.
    """

    request_id: str
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


EndOfJob = Callable[[Job, int, RequestOutput | None, BaseException | None], None]


class Generation:
    """Several jobs, read together. Leaving the ``async with`` block aborts unfinished ones.

    Only the latest output of each job is kept, so a slow reader costs no memory: it gets larger
    pieces.

    Args:
        engine: runs the jobs.
        jobs: what to run.
        timeout: seconds they may take; None for no limit.
        ended: called for every job that ended, with the job, when it began in nanoseconds since
            the epoch, its last output, and the error it failed with.
        final_only: whether only the last outputs are wanted.
        form: the required form of the answers, if any: errors about it name its field.
    """

    def __init__(
        self,
        engine: EngineClient,
        jobs: Sequence[Job],
        timeout: float | None = None,
        ended: EndOfJob | None = None,
        final_only: bool = False,
        form: RequestedForm | None = None,
    ) -> None:
        self.jobs, self._form = jobs, form
        self._engine, self._timeout, self._ended = engine, timeout, ended
        self._final_only = final_only
        self._pending: dict[int, RequestOutput] = {}
        self._unfinished = len(jobs)
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Generation:
        self._tasks = [asyncio.create_task(self._read(i, job)) for i, job in enumerate(self.jobs)]
        if self._timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._time_out)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ready(self) -> None:
        """Wait for the first token.

        Raises:
            ZipageError: the engine refused a job.
            ApiError: a job failed or took too long.
        """
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def updates(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Updates as they come: the job's index and its output so far. Errors as in `ready`."""
        while self._unfinished or self._pending:
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            pending, self._pending = self._pending, {}
            for index, output in pending.items():
                yield index, output

    async def results(self) -> list[RequestOutput]:
        """The last output of every job. Errors as in `ready`."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.updates():
            last[index] = output
        return [last[index] for index in range(len(self.jobs))]

    async def _read(self, index: int, job: Job) -> None:
        prompt = {"prompt_token_ids": job.token_ids, "prompt": job.text}
        stream = self._engine.generate(
            prompt,
            job.params,
            job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
            final_only=self._final_only,
        )
        begun = time.time_ns()
        output: RequestOutput | None = None
        failure: BaseException | None = None
        try:
            async with contextlib.aclosing(cast(AsyncGenerator[RequestOutput, None], stream)):
                async for output in stream:
                    self._check(output)
                    self._pending[index] = output
                    self._changed.set()
                    if output.finished:
                        self._unfinished -= 1
        except Exception as error:
            failure = error
            if self._form is not None:
                failure = await asyncio.to_thread(self._form.located, error)
            self._fail(failure)
        finally:
            if self._ended is not None:
                self._ended(job, begun, output, failure)

    def _check(self, output: RequestOutput) -> None:
        """A failed choice fails its request."""
        if output.error is not None:
            if not self._engine.is_running:
                raise unavailable(output.error)
            raise ApiError(500, f"the request failed: {output.error}")
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            raise unavailable("the request was aborted because the engine is shutting down")

    def _time_out(self) -> None:
        self._fail(ApiError(504, f"the request took longer than {self._timeout:g} seconds"))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()


@dataclass
class Delta:
    """What was added to a completion.

    Attributes:
        completion: all of it so far.
        first: whether nothing of it was reported before.
    """

    completion: CompletionOutput
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    compressions: list[CompressionRecord]


@dataclass
class DeltaTracker:
    """Tracks what was reported of one completion."""

    _characters: int = 0
    _tokens: int = 0
    _compressions: int = 0
    _finished: bool = False
    _started: bool = field(default=False)

    def update(self, completion: CompletionOutput) -> Delta | None:
        """What is new in it; None if nothing is."""
        if self._finished:
            return None
        tokens = completion.token_ids[self._tokens :]
        text = completion.text[self._characters :]
        if not (tokens or text or completion.finished):
            return None
        logprobs = completion.logprobs
        kv_stats = completion.kv_stats or []
        delta = Delta(
            completion,
            not self._started,
            text,
            tokens,
            None if logprobs is None else logprobs[self._tokens :],
            kv_stats[self._compressions :],
        )
        self._characters, self._tokens = len(completion.text), len(completion.token_ids)
        self._compressions, self._started = len(kv_stats), True
        self._finished = completion.finished
        return delta
