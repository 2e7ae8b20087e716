"""Counts, logs and traces requests that are accepted, refused or ended."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Protocol

from zipage.engine.core_io import EngineRequest
from zipage.engine.stats import EngineStats, FinishedCompletion
from zipage.observe.trace import TraceRecorder
from zipage.outputs import FinishReason, RequestMetrics

logger = logging.getLogger(__name__)

_ENDS = {
    "stop": "finished (stop)",
    "length": "finished (length)",
    "abort": "aborted",
    "error": "failed",
}


@dataclass
class _Counters:
    """Fields of `EngineStats`, by the same names."""

    requests_submitted: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    completions_stop: int = 0
    completions_length: int = 0
    completions_abort: int = 0
    completions_error: int = 0


class Answer(Protocol):
    """One of a request's answers that ended."""

    sequence_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None
    metrics: RequestMetrics


class RequestAccounts:
    """Keeps account of requests from submission to end. Sees no text.

    Attributes:
        recorder: trace recorder that is notified when requests end; None if nothing is traced.
    """

    def __init__(self) -> None:
        self.recorder: TraceRecorder | None = None
        self._counters = _Counters()
        self._ended: list[FinishedCompletion] = []

    def refused(self, request_id: object, why: str) -> None:
        """A request was refused; `why` must not quote its prompt."""
        self._counters.requests_refused += 1
        name = request_id if isinstance(request_id, str) else None
        # Quoted: of all ids in the log, this one may have been refused for what it holds.
        shown = repr(name) if name else "without id"
        logger.info("request %s is refused: %s", shown, why, extra={"request_id": name})

    def accepted(self, request: EngineRequest, kv_budget: int | None) -> None:
        """A request was queued."""
        self._counters.requests_submitted += 1
        self._counters.prompt_tokens += len(request.prompt_token_ids)
        if logger.isEnabledFor(logging.INFO):
            fields = {
                "request_id": request.request_id,
                "prompt_tokens": len(request.prompt_token_ids),
                "n": request.params.n,
                "max_tokens": request.max_tokens,
                "kv_budget": kv_budget,
            }
            logger.info(
                "request %(request_id)s is queued: %(prompt_tokens)d prompt tokens, %(n)d answers "
                "of at most %(max_tokens)d tokens, kv_budget %(kv_budget)s",
                fields,
                extra=fields,
            )

    def ended(self, request: EngineRequest, answer: Answer) -> None:
        """One of a request's answers ended."""
        reason = answer.finish_reason
        assert reason is not None
        name = f"completions_{reason}"
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        prompt_tokens, generated = len(request.prompt_token_ids), len(answer.token_ids)
        self._ended.append(
            FinishedCompletion(
                request_id=request.request_id,
                index=answer.index,
                finish_reason=reason,
                prompt_tokens=prompt_tokens,
                generated_tokens=generated,
                max_tokens=request.max_tokens,
                metrics=answer.metrics,
                n=request.params.n,
            )
        )
        if self.recorder is not None:
            self.recorder.ended(answer.sequence_id, reason, answer.metrics)
        level = logging.WARNING if reason == "error" else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "request %s, answer %d: %s after %d tokens, %d compressions (%d tokens evicted) "
                "and %.3f s%s",
                request.request_id,
                answer.index,
                _ENDS[reason],
                generated,
                answer.metrics.compressions,
                answer.metrics.evicted_tokens,
                answer.metrics.e2e_time,
                f": {answer.error}" if answer.error else "",
                extra={
                    "request_id": request.request_id,
                    "sequence_id": answer.sequence_id,
                    "index": answer.index,
                    "finish_reason": reason,
                    "prompt_tokens": prompt_tokens,
                    "generated_tokens": generated,
                    **dataclasses.asdict(answer.metrics),
                },
            )

    def take_ended(self) -> list[FinishedCompletion]:
        """Answers that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fill(self, stats: EngineStats) -> EngineStats:
        """Add the counters kept here to a snapshot."""
        vars(stats).update(vars(self._counters))
        return stats
