"""Requests in, outputs out, in one thread: input processing, the core, output processing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Set
from typing import Any

from zipage.config import EngineConfig
from zipage.engine.accounts import RequestAccounts
from zipage.engine.core import EngineCore
from zipage.engine.input_processor import InputProcessor, Prompt
from zipage.engine.output_processor import OutputProcessor
from zipage.engine.stats import EngineStats
from zipage.errors import EngineDeadError, ModelError, RequestError
from zipage.observe.trace import TraceRecorder
from zipage.outputs import RequestMetrics, RequestOutput
from zipage.sampling_params import SamplingParams

__all__ = ["LLMEngine", "Prompt"]

logger = logging.getLogger(__name__)


class LLMEngine:
    """The engine behind `LLM` and `AsyncLLM`. Not thread-safe.

    Args:
        config: the options; see `EngineConfig`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.core = EngineCore(config)
        model = self.core.model_info()
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self._accounts = RequestAccounts()
        self.inputs = InputProcessor(config, model, self._accounts)
        self.core.grammars = self.inputs.grammars
        self.outputs = OutputProcessor(
            lambda: self.tokenizer, model.eos_token_ids, self._accounts, self._abort_sequence
        )
        self._dead: BaseException | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when first needed.

        Raises:
            ModelError: there is none, or it cannot be loaded.
        """
        return self.inputs.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model's tokenizer can be loaded; dummy weights may have none."""
        try:
            return self.tokenizer is not None
        except ModelError:
            return False

    # ------------------------------------------------------------------ submission

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Validate and queue a request; returns its id.

        Args:
            prompt: text or token ids.
            params: how to sample, `kv_budget` and `compression` included.
            request_id: unique among live requests; made up if None.
            priority: lower runs earlier.
            stream: whether `step` reports every token, not only the end.
            cache_salt: requests share prefix-cache blocks only with requests of equal salt.

        Raises:
            RequestError: something is wrong with the request; nothing was queued.
            EngineDeadError: the engine has failed.
        """
        self._check_alive()
        request, text = self.inputs.process(
            prompt, params, request_id, priority, cache_salt, stream, self.live_requests
        )
        try:
            self.outputs.add(request, text)
            try:
                self.core.submit(request)
            except BaseException:
                self.outputs.forget(request)
                with self._stopping_on_failure():
                    for sequence_id in request.sequence_ids:
                        self.core.abort(sequence_id)
                raise
        except RequestError as error:
            self._accounts.refused(request_id, str(error))
            raise
        self._accounts.accepted(request, self.inputs.kv_budget_of(request))
        return request.request_id

    # ------------------------------------------------------------------ running

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.live_requests) or self.core.has_unfinished

    @property
    def live_requests(self) -> Set[str]:
        """Ids of the requests that have not ended."""
        return self.outputs.live_requests

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the outputs of requests that ended or stream.

        Raises:
            EngineDeadError: the engine failed in a way it could not contain. Call
                `fail_all` for the outputs of the requests it held.
        """
        self._check_alive()
        with self._stopping_on_failure():
            outputs = self.outputs.process(self.core.step())
            self.core.last_step.finished = self._accounts.take_ended()
        return outputs

    @contextlib.contextmanager
    def _stopping_on_failure(self) -> Iterator[None]:
        """Declare the engine dead after any exception, which may leave the bookkeeping broken."""
        try:
            yield
        except Exception as error:
            logger.critical("the engine stopped", exc_info=error)
            self.kill(error)
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _abort_sequence(self, sequence_id: str) -> RequestMetrics | None:
        # The bookkeeping of an engine that has failed is left alone.
        return None if self._dead is not None else self.core.abort(sequence_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; returns its last output, None if it is not live or the
        engine has failed (see `fail_all`).

        Raises:
            EngineDeadError: the engine failed while aborting, see `step`.
        """
        if self._dead is not None:
            return None
        with self._stopping_on_failure():
            return self.outputs.end(request_id, "abort")

    def kill(self, error: BaseException) -> None:
        """Refuse everything from now on, because of `error`."""
        if self._dead is None:
            self._dead = error

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End every live request with `error`; returns their last outputs."""
        return self.outputs.end_all(f"{type(error).__name__}: {error}")

    def _check_alive(self) -> None:
        if self._dead is not None:
            cause = self._dead
            name = "" if isinstance(cause, EngineDeadError) else f"{type(cause).__name__}: "
            raise EngineDeadError(f"the engine stopped: {name}{cause}") from cause

    def shutdown(self) -> None:
        """Abort everything; release threads, weights and KV pool."""
        failed = self._dead is not None
        if not failed:
            self._dead = EngineDeadError("it was shut down")
        self.outputs.clear()
        self.core.shutdown(failed)

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges, with what happened in the last step."""
        return self._accounts.fill(self.core.stats())

    def start_trace(self, recorder: TraceRecorder) -> None:
        """Record the requests submitted from now on, and every step.

        Raises:
            RequestError: another trace is being recorded.
        """
        if self._accounts.recorder is not None:
            raise RequestError("a trace is being recorded already: stop it first")
        self._accounts.recorder = self.core.recorder = recorder

    def stop_trace(self) -> None:
        """Stop recording."""
        self._accounts.recorder = self.core.recorder = None
