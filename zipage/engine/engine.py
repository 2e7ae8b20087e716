"""Requests in, outputs out: validation, tokens, `n` answers, text and metrics around the core."""

from __future__ import annotations

import contextlib
import itertools
import logging
import numbers
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zipage.config import EngineConfig
from zipage.engine.accounts import RequestAccounts
from zipage.engine.core import EngineCore
from zipage.engine.detokenizer import IncrementalDetokenizer, decode_final, token_text
from zipage.engine.request import Request
from zipage.engine.sequence import SequenceState
from zipage.engine.stats import EngineStats
from zipage.engine.steps import TokenUpdate
from zipage.errors import ConfigError, EngineDeadError, ModelError, RequestError, shown
from zipage.execution.sampler import SamplingState
from zipage.observe.trace import TraceRecorder
from zipage.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Usage,
)
from zipage.sampling_params import SamplingParams
from zipage.tokenizer import encode_prompt, load_tokenizer

logger = logging.getLogger(__name__)

#: A prompt: text, token ids, or vLLM's ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``.
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class _Group:
    """A submitted request and its `n` answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    requests: list[Request] = field(default_factory=list)
    unfinished: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    @property
    def log_fields(self) -> dict[str, Any]:
        return {"request_id": self.request_id}


class LLMEngine:
    """The engine behind `LLM`, `AsyncLLM` and the server. Not thread-safe.

    Args:
        config: the options; see `EngineConfig`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.core = EngineCore(config)
        runner = self.core.runner
        self.max_model_len = runner.max_model_len
        self.vocab_size = runner.model_config.vocab_size
        self._tokenizer_source = config.tokenizer
        if config.tokenizer is None and runner.model_path is not None:
            self._tokenizer_source = str(runner.model_path)
        self._tokenizer: Any = None
        self._groups: dict[str, _Group] = {}
        self._ids = itertools.count()
        self._serial = itertools.count()
        self._dead: BaseException | None = None
        self._accounts = RequestAccounts()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when first needed.

        Raises:
            ModelError: there is none, or it cannot be loaded.
        """
        if self._tokenizer is None:
            if self._tokenizer_source is None:
                raise ModelError(
                    f"model_shape={self.config.model_shape!r} has no tokenizer: give prompts as "
                    f"token ids and set detokenize=False in SamplingParams, or name a tokenizer"
                )
            self._tokenizer = load_tokenizer(self._tokenizer_source, self.config.revision)
        return self._tokenizer

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
        salt: str = "",
    ) -> str:
        """Validate and queue a request; returns its id.

        Args:
            prompt: text or token ids.
            params: how to sample, `kv_budget` and `compression` included.
            request_id: unique among live requests; made up if None.
            priority: lower runs earlier.
            stream: whether `step` reports every token, not only the end.
            salt: requests share prefix-cache blocks only with requests of equal salt.

        Raises:
            RequestError: something is wrong with the request; nothing was queued.
            EngineDeadError: the engine has failed.
        """
        self._check_alive()
        try:
            text, token_ids = self._resolve_prompt(prompt)
        except RequestError:
            self._accounts.refused(
                request_id, "its prompt is not legal"
            )  # The message may quote it.
            raise
        try:
            return self._submit(text, token_ids, params, request_id, priority, stream, salt)
        except RequestError as error:
            self._accounts.refused(request_id, str(error))
            raise

    def _submit(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        stream: bool,
        salt: str,
    ) -> str:
        if not isinstance(salt, str) or not _is_unicode(salt):
            raise RequestError(f"salt={shown(salt)} must be a string of valid Unicode")
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id={shown(request_id)} must be a string or None")
        if request_id is None:
            request_id = next(
                name for i in self._ids if (name := f"request-{i}") not in self._groups
            )
        if request_id in self._groups:
            raise RequestError(f"request_id {shown(request_id)} is already in use")
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise RequestError(f"priority={shown(priority)} must be an integer")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}"
            )
        if params.detokenize:
            _ = self.tokenizer  # without one refused here, not when its answer is decoded
        params.verify(self.vocab_size)
        max_blocks = self._resolve_budget(params)
        max_tokens = self._resolve_max_tokens(params, len(token_ids), max_blocks)
        group = _Group(request_id, text, token_ids, params, stream)
        for index in range(params.n):
            group.requests.append(
                self._make_request(group, index, max_tokens, max_blocks, int(priority), salt)
            )
        try:
            for request in group.requests:
                self.core.add(request)
        except BaseException:
            with self._stopping_on_failure():
                for request in group.requests:
                    self.core.abort(request.request_id)
            raise
        group.unfinished = params.n
        self._groups[request_id] = group
        self._accounts.accepted(request_id, group.requests)
        return request_id

    def _resolve_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"prompt has keys {shown(list(prompt))}: legal are 'prompt' (text) and "
                    "'prompt_token_ids'"
                )
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids")
            ids = text if given is None else given
            if given is not None:
                if isinstance(ids, str):
                    raise RequestError(f"prompt_token_ids={shown(ids)} must be a list of token ids")
                if text is not None and not isinstance(text, str):
                    raise RequestError(f"prompt={shown(text)} must be text")
        if isinstance(ids, str):
            text = ids
            ids = encode_prompt(self.tokenizer, text)
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise RequestError(f"prompt must be text or token ids, got {type(ids).__name__}")
        token_ids = list(ids)
        if not token_ids:
            raise RequestError("prompt is empty: at least one token is needed")
        if set(map(type, token_ids)) != {int}:
            token_ids = [_token_id(token) for token in token_ids]
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt_token_ids holds {shown(token)}: the vocabulary has ids 0 to "
                    f"{self.vocab_size - 1}"
                )
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens: with at least one generated token it "
                f"exceeds max_model_len={self.max_model_len}"
            )
        return text, token_ids

    def _resolve_budget(self, params: SamplingParams) -> int | None:
        if params.compression == "off":
            if params.kv_budget is not None:
                raise RequestError("kv_budget has no meaning with compression='off'")
            return None
        if not self.config.compresses:
            if params.kv_budget is not None or params.compression == "on":
                raise RequestError(
                    "kv_budget and compression='on' need an engine with a compression policy, "
                    "this one runs with compression='full'"
                )
            return None
        budget = self.config.kv_budget if params.kv_budget is None else params.kv_budget
        if budget is None and params.compression == "on":
            raise RequestError("compression='on' needs a kv_budget: the engine has no default")
        try:
            self.config.check_budget(budget)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return self.config.max_blocks_of(budget)

    def _resolve_max_tokens(
        self, params: SamplingParams, prompt_len: int, max_blocks: int | None
    ) -> int:
        room = self.max_model_len - prompt_len
        if params.max_tokens is None:
            if max_blocks is None:
                # Full KV: what the pool can hold is a limit like the model's length.
                pool = self.core.scheduler.config.num_blocks * self.config.block_size
                room = max(1, min(room, pool - prompt_len + 1))
            if params.min_tokens > room:
                raise RequestError(
                    f"min_tokens={params.min_tokens} is not legal: after {prompt_len} prompt "
                    f"tokens there is room for {room}"
                )
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens} and {prompt_len} prompt tokens exceed "
                f"max_model_len={self.max_model_len}: max_tokens can be at most {room}"
            )
        return params.max_tokens

    def _make_request(
        self,
        group: _Group,
        index: int,
        max_tokens: int,
        max_blocks: int | None,
        priority: int,
        salt: str,
    ) -> Request:
        params, runner = group.params, self.core.runner
        output: list[int] = []
        sampling = SamplingState(
            params,
            group.prompt_token_ids,
            output,
            runner.model_config.eos_token_ids,
            self.vocab_size,
            runner.device,
            index,
        )
        detokenizer = None
        if params.detokenize and (group.stream or params.stop):
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                group.prompt_token_ids,
                params,
                runner.model_config.eos_token_ids,
            )
        answer = SequenceState(group.request_id, params, sampling, output, index, detokenizer)
        if params.logprobs is not None:
            answer.logprobs, answer.cumulative_logprob = [], 0.0
        if params.return_kv_stats:
            answer.kv_stats = []
        reads_prompt = (
            params.prompt_logprobs is not None and index == 0 and len(group.prompt_token_ids) > 1
        )
        return Request(
            # Unique for ever, unlike the caller's id, which is free again once the request ended.
            request_id=f"{group.request_id}#{index}@{next(self._serial)}",
            prompt_token_ids=group.prompt_token_ids,
            max_tokens=max_tokens,
            block_size=self.config.block_size,
            max_blocks=max_blocks,
            window=self.config.resolved_window,
            priority=priority,
            bounded_prefill=self.config.bounded_prefill,
            salt=salt.encode(),
            leader=group.requests[0] if index and self.config.enable_prefix_caching else None,
            # One answer reads the prompt's logits for all of them.
            next_prompt_logits=0 if reads_prompt else None,
            report_kept=params.return_kv_stats or self._accounts.recorder is not None,
            external_id=group.request_id,
            payload=answer,
        )

    # ------------------------------------------------------------------ running

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._groups) or self.core.has_unfinished

    @property
    def live_requests(self) -> Set[str]:
        """Ids of the requests that have not ended."""
        return self._groups.keys()

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the outputs of requests that ended or stream.

        Raises:
            EngineDeadError: the engine failed in a way it could not contain. Call
                `fail_all` for the outputs of the requests it held.
        """
        self._check_alive()
        with self._stopping_on_failure():
            outputs = self._publish(self.core.step())
            self.core.last_step.finished = self._accounts.take_ended()
            if self._groups and not self.core.has_unfinished:
                raise RuntimeError(f"requests {sorted(self._groups)} were lost")
        return outputs

    @contextlib.contextmanager
    def _stopping_on_failure(self) -> Iterator[None]:
        """What goes wrong here may have left the bookkeeping broken: nothing may go on."""
        try:
            yield
        except Exception as error:
            logger.critical("the engine stopped", exc_info=error)
            self.kill(error)
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _publish(self, updates: list[TokenUpdate]) -> list[RequestOutput]:
        touched: dict[str, _Group] = {}
        for update in updates:
            answer: SequenceState = update.request.payload
            group = self._groups.get(answer.group_id)
            if group is None:
                continue
            self._apply(group, answer, update)
            if group.finished or (group.stream and (update.token_ids or update.finish_reason)):
                touched[group.request_id] = group
        return [self._report(group) for group in touched.values()]

    def _apply(self, group: _Group, answer: SequenceState, update: TokenUpdate) -> None:
        if answer.finish_reason is not None:
            return
        answer.num_reported += len(update.token_ids)
        if update.logprobs and answer.logprobs is not None:
            answer.logprobs += update.logprobs
            for token, entry in zip(update.token_ids, update.logprobs, strict=True):
                assert answer.cumulative_logprob is not None
                answer.cumulative_logprob += entry[token].logprob
        reason, stop_reason = update.finish_reason, update.stop_reason
        described = update.logprobs or []
        if update.prompt_logprobs:
            group.prompt_logprobs += update.prompt_logprobs
            described = described + update.prompt_logprobs
        if described or (update.token_ids and answer.detokenizer is not None):
            found = None
            try:
                for entry in described if answer.params.detokenize else ():
                    for candidate, logprob in entry.items():
                        logprob.decoded_token = token_text(self.tokenizer, candidate)
                if answer.detokenizer is not None:
                    answer.text += answer.detokenizer.push(update.token_ids)
                    found = answer.detokenizer.stopped
            except Exception as error:
                logger.exception(
                    "detokenising request %s failed", group.request_id, extra=group.log_fields
                )
                reason = "error"
                update.error = f"detokeniser failed: {type(error).__name__}: {error}"
            if found is not None:
                reason, stop_reason = "stop", found
                # A step may settle the one before it and bring a token of its own.
                del answer.output_token_ids[answer.num_reported :]
            if reason is not None and update.finish_reason is None:
                self.core.abort(update.request.request_id)
        if reason is not None:
            self._end(group, answer, reason, stop_reason, update.error)

    def _end(
        self,
        group: _Group,
        answer: SequenceState,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        answer.finish_reason, answer.stop_reason, answer.error = reason, stop_reason, error
        try:
            if answer.detokenizer is not None:
                answer.text += answer.detokenizer.finish()
                found = answer.detokenizer.stopped
                if found is not None and reason in ("stop", "length"):
                    # Perhaps only now: its end may have waited for a character to be completed.
                    answer.finish_reason, answer.stop_reason = "stop", found
            elif answer.output_token_ids and answer.params.detokenize:
                answer.text = decode_final(
                    self.tokenizer,
                    group.prompt_token_ids,
                    answer.output_token_ids,
                    answer.params,
                    self.core.runner.model_config.eos_token_ids,
                )
        except Exception as failure:
            if answer.error is None:
                logger.exception(
                    "detokenising request %s failed", group.request_id, extra=group.log_fields
                )
                answer.finish_reason = "error"
                answer.error = f"detokeniser failed: {type(failure).__name__}: {failure}"
        group.unfinished -= 1
        self._accounts.ended(group.requests[answer.index], answer)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; returns its last output, None if it is not live or the
        engine has failed (see `fail_all`).

        Raises:
            EngineDeadError: the engine failed over it, see `step`.
        """
        group = self._groups.get(request_id)
        if group is None or self._dead is not None:
            return None
        with self._stopping_on_failure():
            return self._end_group(group, "abort", None)

    def kill(self, error: BaseException) -> None:
        """Refuse everything from now on, because of `error`."""
        if self._dead is None:
            self._dead = error

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End every live request with `error`; returns their last outputs."""
        cause = f"{type(error).__name__}: {error}"
        outputs = []
        for group in list(self._groups.values()):
            try:
                outputs.append(self._end_group(group, "error", cause))
            except Exception:  # what broke the engine may be what reports its end
                message = "no last output can be made for request %s"
                logger.exception(message, group.request_id, extra=group.log_fields)
        return outputs

    def _end_group(self, group: _Group, reason: FinishReason, error: str | None) -> RequestOutput:
        for request in group.requests:
            answer = request.payload
            if answer.finish_reason is None:
                if self._dead is None:
                    self.core.abort(request.request_id)
                self._end(group, answer, reason, error=error)
        return self._report(group)

    def _check_alive(self) -> None:
        if self._dead is not None:
            cause = self._dead
            name = "" if isinstance(cause, EngineDeadError) else f"{type(cause).__name__}: "
            raise EngineDeadError(f"the engine stopped: {name}{cause}") from cause

    def shutdown(self) -> None:
        """Abort everything and release threads."""
        failed = self._dead is not None
        if not failed:
            self._dead = EngineDeadError("it was shut down")
        self._groups.clear()
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
        """Record nothing more."""
        self._accounts.recorder = self.core.recorder = None

    # ------------------------------------------------------------------ outputs

    def _report(self, group: _Group) -> RequestOutput:
        if group.finished:
            self._groups.pop(group.request_id, None)
        completions = [
            CompletionOutput(
                index=answer.index,
                text=answer.text,
                token_ids=list(answer.output_token_ids),
                cumulative_logprob=answer.cumulative_logprob,
                logprobs=None if answer.logprobs is None else list(answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                metrics=self._accounts.metrics(request),
                kv_stats=None if answer.kv_stats is None else list(answer.kv_stats),
            )
            for request, answer in ((r, r.payload) for r in group.requests)
        ]
        prompt_tokens = len(group.prompt_token_ids)
        generated = sum(len(c.token_ids) for c in completions)
        read = (
            group.params.prompt_logprobs is not None and len(group.prompt_logprobs) == prompt_tokens
        )
        errors = [r.payload.error for r in group.requests if r.payload.error]
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=completions,
            finished=group.finished,
            metrics=RequestMetrics.aggregate([c.metrics for c in completions]),
            usage=Usage(prompt_tokens, generated),
            error=errors[0] if errors else None,
            prompt_logprobs=group.prompt_logprobs if read else None,
        )


def _token_id(token: Any) -> int:
    """An integer of any library as a plain one."""
    if isinstance(token, bool) or not isinstance(token, numbers.Integral):
        raise RequestError(f"prompt_token_ids holds {shown(token)}, which is not an integer")
    return int(token)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
