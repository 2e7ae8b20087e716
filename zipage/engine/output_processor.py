"""Turns token updates into outputs: text, stop strings, log-probabilities, `n` answers."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

from zipage.engine.accounts import RequestAccounts
from zipage.engine.core_io import EngineRequest, TokenUpdate
from zipage.engine.detokenizer import IncrementalDetokenizer, decode_final, token_text
from zipage.engine.request import EPOCH
from zipage.errors import RequestError, shown
from zipage.outputs import (
    CompletionOutput,
    CompressionRecord,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Usage,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Answer:
    """One of the `n` answers of a request.

    `detokenizer` is set if the text is read while it is generated, or a stop string has to be
    found; otherwise the text is decoded once at the end.
    """

    sequence_id: str
    index: int
    metrics: RequestMetrics
    detokenizer: IncrementalDetokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    kv_stats: list[CompressionRecord] | None = None


@dataclass(eq=False, slots=True)
class _Group:
    """A submitted request and its answers."""

    request: EngineRequest
    prompt: str | None
    answers: list[_Answer]
    unfinished: int
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    @property
    def log_fields(self) -> dict[str, Any]:
        return {"request_id": self.request.request_id}


class OutputProcessor:
    """Makes the outputs of requests. Knows the engine only through its updates. Not thread-safe.

    Args:
        get_tokenizer: returns the tokenizer.
        eos_token_ids: end-of-sequence tokens of the model.
        accounts: records every answer that ends.
        stop: called with the sequence id of an answer that ends here, by a stop string, a failure
            or an abort, so that the core ends it too; may return the answer's metrics.
    """

    def __init__(
        self,
        get_tokenizer: Callable[[], Any],
        eos_token_ids: Iterable[int],
        accounts: RequestAccounts,
        stop: Callable[[str], RequestMetrics | None],
    ) -> None:
        self._get_tokenizer = get_tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._accounts = accounts
        self._stop = stop
        self._groups: dict[str, _Group] = {}
        #: Answers that have not ended, by sequence id.
        self._answers: dict[str, tuple[_Group, _Answer]] = {}

    @property
    def live_requests(self) -> Set[str]:
        """Ids of the requests that have not ended."""
        return self._groups.keys()

    def add(self, request: EngineRequest, prompt: str | None) -> None:
        """Expect updates for a request; `prompt` is its text, None if it was given as token ids.

        Raises:
            RequestError: the request's id is in use.
        """
        if request.request_id in self._groups:
            raise RequestError(f"request_id {shown(request.request_id)} is already in use")
        params = request.params
        answers = []
        for index, sequence_id in enumerate(request.sequence_ids):
            answer = _Answer(
                sequence_id, index, RequestMetrics(arrival_time=EPOCH + request.arrival_time)
            )
            if params.detokenize and (request.stream or params.stop):
                answer.detokenizer = IncrementalDetokenizer(
                    self._get_tokenizer(), request.prompt_token_ids, params, self._eos_token_ids
                )
            if params.logprobs is not None:
                answer.logprobs, answer.cumulative_logprob = [], 0.0
            if params.return_kv_stats:
                answer.kv_stats = []
            answers.append(answer)
        group = _Group(request, prompt, answers, len(answers))
        self._groups[request.request_id] = group
        self._answers.update((answer.sequence_id, (group, answer)) for answer in answers)

    def forget(self, request: EngineRequest) -> bool:
        """Drop a request that was not queued after all; False if it has ended already."""
        group = self._groups.get(request.request_id)
        if group is None or group.request is not request:
            return False
        del self._groups[request.request_id]
        for sequence_id in request.sequence_ids:
            self._answers.pop(sequence_id, None)
        return True

    def clear(self) -> None:
        """Forget all requests."""
        self._groups.clear()
        self._answers.clear()

    def process(self, updates: Iterable[TokenUpdate]) -> list[RequestOutput]:
        """Take what a step did; returns the outputs of requests that ended or stream.

        Updates of answers that have ended are ignored.
        """
        touched: dict[str, _Group] = {}
        for update in updates:
            found = self._answers.get(update.sequence_id)
            if found is None:
                continue
            group, answer = found
            self._apply(group, answer, update)
            if group.finished or (
                group.request.stream and (update.token_ids or update.finish_reason)
            ):
                touched[group.request.request_id] = group
        return [self._report(group) for group in touched.values()]

    def end(
        self, request_id: str, reason: FinishReason, error: str | None = None
    ) -> RequestOutput | None:
        """End a request now; returns its last output, None if it is not live."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for answer in group.answers:
            if answer.finish_reason is None:
                metrics = self._stop(answer.sequence_id) or _until_now(group, answer)
                self._end(group, answer, reason, metrics, error=error)
        return self._report(group)

    def end_all(self, error: str) -> list[RequestOutput]:
        """End all requests with `error`; returns their last outputs, as far as they can be made."""
        outputs = []
        for request_id, group in list(self._groups.items()):
            try:
                output = self.end(request_id, "error", error)
            except Exception:  # reporting may be what broke the engine
                message = "no last output can be made for request %s"
                logger.exception(message, request_id, extra=group.log_fields)
            else:
                if output is not None:
                    outputs.append(output)
        return outputs

    # ------------------------------------------------------------------ one answer

    def _apply(self, group: _Group, answer: _Answer, update: TokenUpdate) -> None:
        answer.token_ids += update.token_ids
        if update.metrics is not None:
            answer.metrics = update.metrics
        if update.kv_stats and answer.kv_stats is not None:
            answer.kv_stats += update.kv_stats
        if update.logprobs and answer.logprobs is not None:
            answer.logprobs += update.logprobs
            for token, entry in zip(update.token_ids, update.logprobs, strict=True):
                assert answer.cumulative_logprob is not None
                answer.cumulative_logprob += entry[token].logprob
        reason: FinishReason | None = update.finish_reason
        stop_reason: int | str | None = update.stop_reason
        error = update.error
        described = update.logprobs or []
        if update.prompt_logprobs:
            group.prompt_logprobs += update.prompt_logprobs
            described = described + update.prompt_logprobs
        if described or (update.token_ids and answer.detokenizer is not None):
            found = None
            try:
                for entry in described if group.request.params.detokenize else ():
                    for candidate, logprob in entry.items():
                        logprob.decoded_token = token_text(self._get_tokenizer(), candidate)
                if answer.detokenizer is not None:
                    answer.text += answer.detokenizer.push(update.token_ids)
                    found = answer.detokenizer.stopped
            except Exception as failure:
                logger.exception(
                    "detokenising request %s failed",
                    group.request.request_id,
                    extra=group.log_fields,
                )
                reason = "error"
                error = f"detokeniser failed: {type(failure).__name__}: {failure}"
            if found is not None:
                reason, stop_reason = "stop", found
        if reason is not None:
            metrics = update.metrics
            if update.finish_reason is None:
                metrics = self._stop(answer.sequence_id) or metrics
            self._end(
                group, answer, reason, metrics or _until_now(group, answer), stop_reason, error
            )

    def _end(
        self,
        group: _Group,
        answer: _Answer,
        reason: FinishReason,
        metrics: RequestMetrics,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        answer.finish_reason, answer.stop_reason, answer.error = reason, stop_reason, error
        answer.metrics = metrics
        request = group.request
        try:
            if answer.detokenizer is not None:
                answer.text += answer.detokenizer.finish()
                found = answer.detokenizer.stopped
                if found is not None and reason in ("stop", "length"):
                    # Possibly found only now: its end may have waited for an incomplete character.
                    answer.finish_reason, answer.stop_reason = "stop", found
            elif answer.token_ids and request.params.detokenize:
                answer.text = decode_final(
                    self._get_tokenizer(),
                    request.prompt_token_ids,
                    answer.token_ids,
                    request.params,
                    self._eos_token_ids,
                )
        except Exception as failure:
            if answer.error is None:
                logger.exception(
                    "detokenising request %s failed", request.request_id, extra=group.log_fields
                )
                answer.finish_reason = "error"
                answer.error = f"detokeniser failed: {type(failure).__name__}: {failure}"
        group.unfinished -= 1
        self._answers.pop(answer.sequence_id, None)
        self._accounts.ended(request, answer)

    def _report(self, group: _Group) -> RequestOutput:
        request = group.request
        if group.finished:
            self._groups.pop(request.request_id, None)
        completions = [
            CompletionOutput(
                index=answer.index,
                text=answer.text,
                token_ids=list(answer.token_ids),
                cumulative_logprob=answer.cumulative_logprob,
                logprobs=None if answer.logprobs is None else list(answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                metrics=self._metrics(group, answer),
                kv_stats=None if answer.kv_stats is None else list(answer.kv_stats),
            )
            for answer in group.answers
        ]
        prompt_tokens = len(request.prompt_token_ids)
        generated = sum(len(c.token_ids) for c in completions)
        read = (
            request.params.prompt_logprobs is not None
            and len(group.prompt_logprobs) == prompt_tokens
        )
        errors = [answer.error for answer in group.answers if answer.error]
        return RequestOutput(
            request_id=request.request_id,
            prompt=group.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=group.finished,
            metrics=RequestMetrics.aggregate([c.metrics for c in completions]),
            usage=Usage(prompt_tokens, generated),
            error=errors[0] if errors else None,
            prompt_logprobs=group.prompt_logprobs if read else None,
        )

    def _metrics(self, group: _Group, answer: _Answer) -> RequestMetrics:
        # An answer's last update brings its metrics; those of its siblings may be older.
        if answer.finish_reason is not None or len(group.answers) == 1:
            return answer.metrics
        return _until_now(group, answer)


def _until_now(group: _Group, answer: _Answer) -> RequestMetrics:
    """An answer's last known metrics, with `e2e_time` as of now."""
    age = time.perf_counter() - group.request.arrival_time
    metrics = answer.metrics
    started = metrics.time_to_first_token is not None
    return dataclasses.replace(
        metrics, e2e_time=age, queue_time=metrics.queue_time if started else age
    )
