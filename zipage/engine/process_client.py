"""Asyncio use of an engine in its own process: tokens are made there, text here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from zipage.config import EngineConfig, is_real
from zipage.engine.accounts import RequestAccounts
from zipage.engine.client import AsyncOutputStream, EngineClient, StepListeners, wake
from zipage.engine.core_io import EngineRequest
from zipage.engine.engine_process import DiedWhileStarting, EngineProcess, error_of
from zipage.engine.input_processor import InputProcessor, Prompt
from zipage.engine.messages import Abort, FromEngine, Reply, StepReport, Submit
from zipage.engine.output_processor import OutputProcessor
from zipage.engine.stats import EngineStats
from zipage.engine.token_pieces import token_pieces
from zipage.errors import ConfigError, EngineDeadError, ModelError, RequestError, shown
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

#: Prompts of at least this many characters are tokenised on a thread.
_LONG_PROMPT = 4096
#: After this many deaths of the engine within this many seconds it is not restarted again.
_MAX_DEATHS = 5
_DEATH_SECONDS = 60.0


class EngineProcessClient(EngineClient):
    """The engine in its own process, for asyncio programs. Like `AsyncLLM`, but tokenising, stop
    strings and detokenising do not hold up the engine, and a crash of it does not end this process.

    All requests of an engine that dies raise EngineDeadError. The process ends with `shutdown`,
    when the client is garbage-collected, and when this process ends in any way.

    Args:
        model: local Hugging Face directory or hub id; None for the embedded zipage-tiny.
        on_step: called on a thread of the client for every step, up to some tenths of a second
            late, with `EngineStats` whose `last_step` says what happened in it. Steps are reported
            in groups; the gauges are those after the last step of a group. It must be quick and
            must not raise: if it does, that is logged and it is not called again.
        max_queued_requests: see `EngineClient`.
        on_engine_death: ``exit`` (stay dead: see `wait_dead`) or ``restart`` (start a new engine
            process, unless too many die).
        start_timeout: seconds that the engine may take to start or restart, including a download
            of its model, before it is killed.
        heartbeat_timeout: seconds without a sign of life after which the engine counts as dead.
        step_timeout: seconds that a step may take before the engine counts as dead.
        **options: any option of `EngineConfig`.

    Raises:
        ConfigError: an option is unknown, illegal or does not fit the others.
        ModelError: the model cannot be loaded.
        EngineDeadError: the engine process ended while starting, or took too long.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_step: Callable[[EngineStats], None] | None = None,
        max_queued_requests: int | None = None,
        on_engine_death: Literal["exit", "restart"] = "exit",
        start_timeout: float = 1800.0,
        heartbeat_timeout: float = 30.0,
        step_timeout: float = 300.0,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options({"model": model, **options})
        super().__init__(config, max_queued_requests, on_step)
        if on_engine_death not in ("exit", "restart"):
            raise ConfigError(
                f"on_engine_death={shown(on_engine_death)}: legal are exit and restart"
            )
        for name, value in (
            ("start_timeout", start_timeout),
            ("heartbeat_timeout", heartbeat_timeout),
            ("step_timeout", step_timeout),
        ):
            if not (is_real(value) and value > 0):
                raise ConfigError(f"{name}={shown(value)} must be a positive number of seconds")
        self._front = _Front(
            config,
            self._listeners,
            on_engine_death == "restart",
            start_timeout,
            heartbeat_timeout,
            step_timeout,
        )
        # No thread refers to this object, so that it can be collected.
        weakref.finalize(self, self._front.shutdown)

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
        front = self._front
        front.check_alive()
        make = front.inputs.process
        if _is_long(prompt) or getattr(params, "structured_outputs", None) is not None:
            request, text = await asyncio.to_thread(
                make, prompt, params, name, priority, cache_salt, stream=not final_only
            )
        else:
            request, text = make(prompt, params, name, priority, cache_salt, stream=not final_only)
        front.submit(request, text, stream)
        return lambda: front.withdraw(name, stream)

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with finish reason ``abort``."""
        self._front.abort(request_id)

    def stats(self) -> EngineStats:
        """Counters, gauges and what happened in the last step, up to some tenths of a second late.

        Counters continue across restarts; what an engine did between its last report and its death
        is not counted.
        """
        return self._front.stats()

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._front.is_running and not self._draining

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""
        return self._front.inputs.model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids the model has logits for."""
        return self._front.inputs.model.vocab_size

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling options the model asks for, see `LLM.get_default_sampling_params`."""
        return self._front.inputs.model.default_sampling

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._front.inputs.tokenizer

    @property
    def engine_pid(self) -> int:
        """Process id of the engine, or of the last one."""
        return self._front.engine_pid

    def shutdown(self) -> None:
        """Stop the engine; running requests end with finish reason ``abort``."""
        self._front.shutdown()

    @property
    def _num_queued(self) -> int:
        return self._front.num_queued

    @property
    def _death(self) -> EngineDeadError | None:
        return self._front.death

    @property
    def _is_final(self) -> bool:
        return not self._front.restarting


class _Front:
    """What the client's threads share: requests, their streams, the process.

    Attributes:
        inputs: checks requests and tokenises.
        num_queued: waiting answers after the last step.
        death: why there is no engine; None while there is one, or after `shutdown`.
        restarting: whether another engine is being started.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_listeners: StepListeners,
        restarts: bool,
        start_timeout: float,
        heartbeat_timeout: float,
        step_timeout: float,
    ) -> None:
        self._config = config
        self._pid = os.getpid()
        self._step_listeners = step_listeners
        self._restarts = restarts
        self._timeouts = (start_timeout, heartbeat_timeout, step_timeout)
        #: Held while requests are touched; steps and requests arrive on different threads.
        self._lock = threading.RLock()
        self._streams: dict[str, AsyncOutputStream] = {}
        #: Submissions without a reply, by the sequence id of the first answer.
        self._unanswered: dict[str, EngineRequest] = {}
        #: Answers that ended here and that the engine has yet to end.
        self._ended: list[str] = []
        self._accounts = RequestAccounts()
        #: Counters of the engines that died.
        self._past = EngineStats()
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._closed = False
        self._restart: threading.Thread | None = None
        self.num_queued = 0
        self.death: EngineDeadError | None = None
        self.restarting = False
        self._process = self._start()
        self._stats = self._idle_stats()
        model = self._process.model
        self.inputs = InputProcessor(config, model, self._accounts)
        self._outputs = OutputProcessor(
            lambda: self.inputs.tokenizer, model.eos_token_ids, self._accounts, self._ended.append
        )
        with contextlib.suppress(ModelError):
            # Built now, so that the first request does not hold up an event loop.
            token_pieces(self.inputs.tokenizer, skip_special_tokens=True)
        self._process.begin()

    def _start(self) -> EngineProcess:
        return EngineProcess(
            self._config,
            self._on_message,
            self._on_death,
            lambda: self._closed,
            *self._timeouts,
        )

    @property
    def is_running(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self.death is None and not self._closed

    @property
    def engine_pid(self) -> int:
        """Process id of the engine, or of the last one."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raise EngineDeadError if there is no engine."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if self.death is not None:
            raise EngineDeadError(str(self.death)) from self.death

    # ------------------------------------------------------------------ requests

    def submit(self, request: EngineRequest, text: str | None, stream: AsyncOutputStream) -> None:
        """Queue a request."""
        sent = request
        if request.params.stop:
            # Stop strings are found here, not by the engine; that needs metrics with every token.
            sent = replace(request, params=replace(request.params, stop=None), stream=True)
        with self._lock:
            self.check_alive()
            try:
                self._outputs.add(request, text)
            except RequestError as error:
                self._accounts.refused(request.request_id, str(error))
                raise
            try:
                self._process.send(Submit(sent))
            except BaseException:
                self._outputs.forget(request)
                raise
            self._streams[request.request_id] = stream
            self._unanswered[request.sequence_ids[0]] = request

    def withdraw(self, request_id: str, stream: AsyncOutputStream) -> None:
        """End a request whose reader has gone."""
        with self._lock:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self._outputs.end(request_id, "abort")
                self._send_ended()

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output."""
        with self._lock:
            output = self._outputs.end(request_id, "abort")
            self._send_ended()
            if output is not None:
                self._deliver([output])

    def _send_ended(self) -> None:
        if self._ended:
            self._process.send(Abort(self._ended.copy()))
            self._ended.clear()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        told = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                if output.finished:
                    del self._streams[output.request_id]
                stream.put(output)
                told.append(stream)
        wake(told)

    # ------------------------------------------------------------------ the process

    def _on_message(self, process: EngineProcess, message: FromEngine) -> None:
        with self._lock:
            if process is not self._process or self._closed:
                return
            if isinstance(message, StepReport):
                outputs = self._outputs.process(message.updates)
                self._send_ended()
                self.num_queued = message.queued
                self._deliver(outputs)
                if message.steps:
                    message.steps[-1].finished = self._accounts.take_ended()
            elif isinstance(message, Reply):
                self._on_reply(message)
        if isinstance(message, StepReport) and message.stats is not None:
            self._on_stats(message.stats, message)

    def _on_reply(self, reply: Reply) -> None:
        request = self._unanswered.pop(reply.sequence_id)
        if reply.kind is None:
            self._accounts.accepted(request, self.inputs.kv_budget_of(request))
            return
        error = error_of(reply.kind, reply.message)
        self._accounts.refused(request.request_id, str(error))
        if self._outputs.forget(request):
            stream = self._streams.pop(request.request_id)
            stream.fail(error)
            wake([stream])

    def _on_stats(self, stats: EngineStats, report: StepReport) -> None:
        if report.steps:
            stats.last_step = report.steps[-1]
        stats.add_counters(self._past)
        self._stats = stats
        for step in report.steps if self._step_listeners else ():
            self._step_listeners.tell(self._accounts.fill(replace(stats, last_step=step)))

    def _idle_stats(self) -> EngineStats:
        """Statistics of an engine that has done nothing yet."""
        blocks = self._process.model.num_kv_blocks
        slots = self._config.resolved_query_slots
        stats = EngineStats(blocks_total=blocks, blocks_free=blocks, query_slots_total=slots)
        stats.add_counters(self._past)
        return stats

    def stats(self) -> EngineStats:
        """The last reported statistics, with current values of what is counted here."""
        return self._accounts.fill(replace(self._stats))

    def _on_death(self, process: EngineProcess, error: EngineDeadError) -> None:
        with self._lock:
            if self._closed or process is not self._process:
                return
            logger.critical("%s", error)
            self.restarting = self._may_restart()
            self.death = error
            for request in self._unanswered.values():
                # It ends below: count it as submitted, or more would end than were submitted.
                self._accounts.accepted(request, self.inputs.kv_budget_of(request))
            self._outputs.end_all(str(error))
            self._ended.clear()
            self._unanswered.clear()
            self.num_queued = 0
            self._past = self._stats = _counters_of(self._stats)
            streams = list(self._streams.values())
            self._streams.clear()
            for stream in streams:
                stream.fail(EngineDeadError(str(error)))
            wake(streams)
            if self.restarting:
                self._restart = threading.Thread(
                    target=self._start_again, name="zipage-restart", daemon=True
                )
                self._restart.start()

    def _may_restart(self) -> bool:
        """Whether another engine may be started; called once for each that died."""
        now = time.monotonic()
        often = len(self._deaths) == _MAX_DEATHS and now - self._deaths[0] < _DEATH_SECONDS
        self._deaths.append(now)
        if self._restarts and often:
            logger.critical("the engine died too often to be restarted again")
        return self._restarts and not often

    def _start_again(self) -> None:
        process: EngineProcess | None = None
        failures = 0
        while process is None:
            try:
                process = self._start()
            except Exception as error:
                with self._lock:
                    if self._closed:
                        return
                    # Dying while starting counts as a death like any other; a reported error would
                    # occur again.
                    failures += 1  # however long each start took
                    died = isinstance(error, DiedWhileStarting)
                    if died and self._may_restart() and failures < _MAX_DEATHS:
                        logger.critical("%s", error)
                        continue
                    logger.critical("the engine could not be restarted", exc_info=error)
                    message = f"{self.death}; it could not be restarted: {error}"
                    self.death = EngineDeadError(message)
                    self.restarting = False
                return
        with self._lock:
            if not self._closed:
                self._process = process
                self._past.engine_restarts += 1
                self._stats = self._idle_stats()
                process.begin()
                self.death, self.restarting = None, False
                logger.warning("the engine was restarted")
                return
        process.begin()  # or it would never be told to stop
        process.stop()

    def shutdown(self) -> None:
        """End requests with finish reason ``abort``, and the process."""
        if os.getpid() != self._pid:
            return  # a fork's copy: the socket to the engine is its parent's
        with self._lock:
            first = not self._closed
            self._closed = True
            for request_id in list(self._outputs.live_requests):
                output = self._outputs.end(request_id, "abort")
                if output is not None:
                    self._deliver([output])
        if first:
            self._process.stop()
            # The garbage collector may have called this on any thread.
            if self._restart is not None and self._restart is not threading.current_thread():
                self._restart.join()


def _counters_of(stats: EngineStats) -> EngineStats:
    counters = EngineStats()
    counters.add_counters(stats)
    return counters


def _is_long(prompt: Prompt) -> bool:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return isinstance(text, str) and len(text) > _LONG_PROMPT
