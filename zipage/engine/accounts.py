"""Who was accepted, refused and ended, with which numbers: counted, logged and traced."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zipage.engine.request import Request
from zipage.engine.sequence import SequenceState
from zipage.engine.stats import EngineStats, FinishedCompletion
from zipage.observe.trace import TraceRecorder
from zipage.outputs import RequestMetrics

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


class RequestAccounts:
    """Keeps account of requests from submission to end. No text goes through here.

    Attributes:
        recorder: is told of both, if there is one.
    """

    def __init__(self) -> None:
        self.recorder: TraceRecorder | None = None
        self._counters = _Counters()
        self._ended: list[FinishedCompletion] = []
        #: What `time.perf_counter` counts from, in seconds since the epoch.
        self._epoch = time.time() - time.perf_counter()

    def refused(self, request_id: object, why: str) -> None:
        """A request was refused; `why` must not quote its prompt."""
        self._counters.requests_refused += 1
        name = request_id if isinstance(request_id, str) else None
        logger.info(
            "request %s is refused: %s", name or "without id", why, extra={"request_id": name}
        )

    def accepted(self, request_id: str, requests: Sequence[Request]) -> None:
        """A request was queued; one of `requests` for each of its answers."""
        first = requests[0]
        self._counters.requests_submitted += 1
        self._counters.prompt_tokens += first.prompt_len
        if self.recorder is not None:
            for index, request in enumerate(requests):
                name = f"{request_id}#{index}" if len(requests) > 1 else request_id
                self.recorder.submitted(request, name)
        if logger.isEnabledFor(logging.INFO):
            most = first.max_blocks
            fields = {
                "request_id": request_id,
                "prompt_tokens": first.prompt_len,
                "n": len(requests),
                "max_tokens": first.max_tokens,
                "kv_budget": None if most is None else (most - 1) * first.block_size,
            }
            logger.info(
                "request %(request_id)s is queued: %(prompt_tokens)d prompt tokens, %(n)d answers "
                "of at most %(max_tokens)d tokens, kv_budget %(kv_budget)s",
                fields,
                extra=fields,
            )

    def ended(self, request: Request, answer: SequenceState) -> None:
        """One of a request's answers ended."""
        reason = answer.finish_reason
        assert reason is not None
        name = f"completions_{reason}"
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        metrics = self.metrics(request)
        generated = len(answer.output_token_ids)
        self._ended.append(
            FinishedCompletion(
                request_id=answer.group_id,
                index=answer.index,
                finish_reason=reason,
                prompt_tokens=request.prompt_len,
                generated_tokens=generated,
                max_tokens=request.max_tokens,
                metrics=metrics,
            )
        )
        if self.recorder is not None:
            self.recorder.ended(request, reason, metrics)
        level = logging.WARNING if reason == "error" else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "request %s, answer %d: %s after %d tokens and %.3f s%s",
                answer.group_id,
                answer.index,
                _ENDS[reason],
                generated,
                metrics.e2e_time,
                f": {answer.error}" if answer.error else "",
                extra={
                    **request.log_fields,
                    "index": answer.index,
                    "finish_reason": reason,
                    "prompt_tokens": request.prompt_len,
                    "generated_tokens": generated,
                    **dataclasses.asdict(metrics),
                },
            )

    def take_ended(self) -> list[FinishedCompletion]:
        """Answers that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fill(self, stats: EngineStats) -> EngineStats:
        """Add what is counted here to a snapshot."""
        vars(stats).update(vars(self._counters))
        return stats

    def metrics(self, request: Request) -> RequestMetrics:
        """Times and events of one answer, up to now if it has not ended."""
        arrival, started = request.arrival_time, request.first_scheduled_time
        first, last = request.first_token_time, request.last_token_time
        # A request that ends by length leaves the scheduler before its last token is known, if
        # steps are scheduled ahead.
        end = max(request.finish_time or time.perf_counter(), last or 0.0)
        rate = 0.0
        if first is not None and end > first and request.num_output_tokens > 1:
            rate = (request.num_output_tokens - 1) / (end - first)
        return RequestMetrics(
            queue_time=(started or end) - arrival,
            time_to_first_token=None if first is None else first - arrival,
            e2e_time=end - arrival,
            tokens_per_second=rate,
            compressions=request.compressions,
            evicted_tokens=request.evicted_tokens,
            peak_blocks=request.peak_blocks,
            preemptions=request.preemptions,
            swaps=request.swaps,
            cached_prompt_tokens=request.cached_prompt_tokens or 0,
            arrival_time=self._epoch + arrival,
            prefill_time=None if first is None or started is None else first - started,
            decode_time=0.0 if first is None or last is None else last - first,
            compression_time=request.compression_seconds,
        )
