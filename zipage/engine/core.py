"""The engine core: schedule, execute, update. One thread; tokens in, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from zipage.compression.executor import CompressionOutcome, make_executor
from zipage.compression.job import CompressionJob
from zipage.compression.retention import count_keepers
from zipage.config import EngineConfig
from zipage.engine.request import PENDING_TOKEN, Request, RequestStatus
from zipage.engine.scheduler import (
    ScheduledTokens,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    SwapMove,
)
from zipage.engine.split import halve_requests, halve_tokens, largest
from zipage.engine.stats import EngineStats, StepStats
from zipage.execution.faults import (
    is_beyond_repair,
    is_out_of_memory,
    release_memory,
    without_frames,
)
from zipage.execution.model_runner import ModelRunner
from zipage.execution.sampler import LaunchedSample, SamplerOutput
from zipage.observe.trace import TraceRecorder
from zipage.outputs import FinishReason, Logprob
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class TokenUpdate:
    """What one step did to one request.

    `prompt_logprobs` are those of the next prompt tokens, if they were asked for; such an update
    may come without a token. `finish_reason` is None while it goes on, else ``stop``, ``length``,
    ``abort`` or ``error``; `stop_reason` is the stop token id that ended it, if one of the
    caller's did.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class _InFlight:
    """A step that runs on the device; its tokens are `PENDING_TOKEN` in the requests.

    Attributes:
        sample: where its tokens come from.
        requests: request, row of the sample, and whether the token is its last one by length.
        rows: request id to the request's row when it was launched.
    """

    sample: LaunchedSample
    requests: list[tuple[Request, int, bool]]
    rows: dict[str, int]


class EngineCore:
    """Generates tokens for requests under Compressed PagedAttention.

    With `async_scheduling` a step is planned and queued while the one before it still runs: the
    tokens of that one stay on the device, where the next step finds them, and are read on the host
    one step later. A request that ends by length leaves at once, one that ends by its text is
    computed once more than needed, and the surplus token is dropped. Blocks given back while a
    step still uses them are safe: whoever gets them writes later in the device's order.

    Not thread-safe: one thread calls all methods.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runner = ModelRunner(config)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self.runner.cache.spec.num_blocks,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_query_slots=config.resolved_query_slots,
                enable_prefix_caching=config.enable_prefix_caching,
                admission=config.admission,
            )
        )
        self.scheduler.on_swap_dropped = lambda r: self.runner.swap.drop(r.request_id)
        asynchronous = config.compresses_beside(self.runner.device.type)
        self._asynchronous = asynchronous
        self._executor = make_executor(self._compress, asynchronous, self.runner.device)
        self._ahead = config.schedules_ahead(self.runner.device.type)
        self._in_flight: _InFlight | None = None
        self._stats = EngineStats()
        #: Of the running step; an interrupted one leaves it to the next.
        self._step = StepStats()
        #: Told of every step, if somebody wants to see them.
        self.recorder: TraceRecorder | None = None
        #: What the running step did so far; an interrupted one leaves it to the next.
        self._updates: list[TokenUpdate] = []

    def add(self, request: Request) -> None:
        """Queue a request whose `payload` is a `SequenceState`. See `Scheduler.add`."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if it is unknown or has ended."""
        if self._in_flight is not None:
            waiting = self._in_flight.requests
            waiting[:] = [entry for entry in waiting if entry[0].request_id != request_id]
        return self.scheduler.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight and self._in_flight.requests)

    # ------------------------------------------------------------------ the step

    def step(self) -> list[TokenUpdate]:
        """One engine step; returns what became of the requests it touched.

        A failure of a compression, a swap or the forward pass ends the requests it touched with
        finish reason ``error``; the others are not disturbed.
        """
        started = time.perf_counter()
        updates, recorder = self._updates, self.recorder
        self._collect(self._executor.poll(), updates)
        jobs = self.scheduler.plan_compressions()
        self._swap(self.runner.swap_out, self.scheduler.take_swap_outs(), updates)
        try:
            while jobs:
                self._submit(jobs.pop(0), updates)
        finally:
            for job in jobs:  # only after an interruption
                cause = RuntimeError("it was interrupted")
                self._collect([CompressionOutcome(job.request_id, cause)], updates)
        if not self._asynchronous:
            self._collect(self._executor.poll(), updates)
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        self._swap(self.runner.swap_out, plan.swap_outs, updates)
        self._swap(self.runner.swap_in, plan.swap_ins, updates)
        self._drop_ended(plan)  # by a failed swap
        if plan.scheduled and self._ahead and self._can_launch(plan):
            self._launch(plan, updates)
        else:
            settled = self._settle(updates)
            self._drop_ended(plan)
            if plan.scheduled:
                self._execute(plan, updates)
            elif self.scheduler.jobs and not settled:
                self._collect(self._executor.wait(), updates)
        ended = time.perf_counter()
        stats, step = self._stats, self._step
        step.index = stats.last_step.index + 1
        step.seconds = ended - started
        step.num_running = len(plan.scheduled)
        stats.step_seconds += step.seconds
        stats.last_step, self._step = step, StepStats()
        self._updates = []
        if recorder is not None:
            recorder.step_ended(step, self.scheduler, plan.scheduled, started, planned, ended)
        return updates

    def _swap(
        self,
        copy: Callable[[SwapMove], None],
        moves: Iterable[SwapMove],
        updates: list[TokenUpdate],
    ) -> None:
        for move in moves:
            if move.request.request_id not in self.scheduler.requests:
                continue  # failed on its way out
            request_id, fields = move.request.request_id, move.request.log_fields
            try:
                copy(move)
                logger.debug(
                    "request %s: %d blocks swapped", request_id, len(move.block_ids), extra=fields
                )
            except Exception as error:
                logger.exception("swapping request %s failed", request_id, extra=fields)
                self.scheduler.finish(move.request)
                self.runner.swap.drop(move.request.request_id)
                updates.append(_failed(move.request, error, "swap"))

    def _submit(self, job: CompressionJob, updates: list[TokenUpdate]) -> None:
        if self.recorder is not None:
            self.recorder.compression_submitted(job, time.perf_counter())
        try:
            self._executor.submit(job)
        except Exception as error:
            self._collect([CompressionOutcome(job.request_id, error)], updates)

    def _compress(self, job: CompressionJob) -> torch.Tensor | None:
        return self.runner.compress(job)

    def _collect(self, outcomes: Iterable[CompressionOutcome], updates: list[TokenUpdate]) -> None:
        for outcome in outcomes:
            self._stats.compression_seconds += outcome.seconds
            if outcome.error is None:
                self._compressed(outcome)
                continue
            request = self.scheduler.fail_compression(outcome.request_id)
            logger.error(
                "compression of request %s failed",
                outcome.request_id,
                exc_info=outcome.error,
                extra=request.log_fields,
            )
            if not request.aborted:
                updates.append(_failed(request, outcome.error, "compression"))

    def _compressed(self, outcome: CompressionOutcome) -> None:
        job = self.scheduler.jobs[outcome.request_id]
        request = self.scheduler.finish_compression(outcome.request_id)
        request.compression_seconds += outcome.seconds
        self._step.compression_seconds.append(outcome.seconds)
        record = None
        if outcome.kept is not None:
            record = count_keepers(outcome.kept, job, outcome.seconds)
            if request.payload.kv_stats is not None:
                request.payload.kv_stats.append(record)
        if self.recorder is not None:
            now = time.perf_counter()
            self.recorder.compression_ended(job, outcome.started, outcome.seconds, now, record)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s compressed from %d to %d tokens in %.1f ms",
                request.request_id,
                job.length,
                job.keep,
                1000 * outcome.seconds,
                extra={
                    **request.log_fields,
                    "length": job.length,
                    "kept": job.keep,
                    "seconds": outcome.seconds,
                },
            )

    def _drop_ended(self, plan: StepPlan) -> None:
        live = self.scheduler.requests
        plan.scheduled = [item for item in plan.scheduled if item.request.request_id in live]

    # ------------------------------------------------------------------ running ahead

    def _can_launch(self, plan: StepPlan) -> bool:
        """Whether nothing of the step needs a token that is still on the device."""
        flight = self._in_flight
        for item in plan.scheduled:
            request = item.request
            if request.token_ids[-1] == PENDING_TOKEN and (
                item.num_tokens > 1
                or flight is None
                or flight.rows.get(request.request_id) != request.row
            ):
                return False
        return self.runner.can_launch(plan.scheduled)

    def _launch(self, plan: StepPlan, updates: list[TokenUpdate]) -> None:
        """Queue the step, then read the tokens of the one before it."""
        sampling = [item.request for item in plan.scheduled if item.samples]
        sample = self._try_launch(plan)
        if sample is None:
            self._settle(updates)
            self._drop_ended(plan)
            if plan.scheduled:
                self._execute(plan, updates)
            return
        owned = self.scheduler.pool.num_owned
        rows = {request.request_id: request.row for request in sampling}
        self._settle(updates)
        self._drop_ended(plan)
        self.scheduler.update(plan)
        self._count_step(len(plan.scheduled), owned)
        live = self.scheduler.requests
        for item in plan.scheduled:
            self._count_tokens(item)
        pending = []
        for row, request in enumerate(sampling):
            if request.request_id not in live:
                continue
            request.token_ids.append(PENDING_TOKEN)
            last = request.num_output_tokens >= request.max_tokens
            if last:
                self.scheduler.finish(request)
            pending.append((request, row, last))
        self._in_flight = _InFlight(sample, pending, rows)

    def _try_launch(self, plan: StepPlan) -> LaunchedSample | None:
        """Queue the step; None if that failed, without having changed anything: it is then run
        again with all tokens known, so that it can be cut."""
        try:
            return self.runner.launch(plan)
        except BaseException as error:
            _forget_draws(plan.scheduled)
            if not isinstance(error, Exception) or is_beyond_repair(error):
                raise
            message = "a step of %d requests could not be queued: %r"
            logger.warning(message, len(plan.scheduled), error)
        # Here nothing refers to the error, whose frames keep the step's tensors.
        release_memory(self.runner.device)
        return None

    def _settle(self, updates: list[TokenUpdate]) -> bool:
        """Read the tokens of the step in flight; returns whether there was one."""
        flight = self._in_flight
        if flight is None:
            return False
        output = flight.sample.wait()
        self._in_flight = None
        now = time.perf_counter()
        for request, row, last in flight.requests:
            if request.status is RequestStatus.FINISHED and not last:
                continue  # aborted meanwhile
            update = TokenUpdate(request, error=output.errors.get(row))
            if update.error is None:
                request.token_ids.pop()
                self._append_token(update, output, row, now)
            else:
                update.finish_reason = "error"
            if update.finish_reason is not None and not last:
                # Not `finish`: its compression may have started.
                self.scheduler.abort(request.request_id)
            updates.append(update)
        return True

    # ------------------------------------------------------------------ step by step

    def _execute(self, plan: StepPlan, updates: list[TokenUpdate]) -> None:
        """Run the step; after an exception once more in parts, to find whom it touches.

        A step writes nothing but the new slots of its requests, which nobody reads before their
        lengths are updated, so that any part of it can be computed again. After an exception
        each half of the requests is tried, down to the one that fails alone and ends. Out of
        memory, the part is halved once by tokens; where that is not enough its largest request
        ends, and the rest starts over.
        """
        computed = failures = 0
        owned = self.scheduler.pool.num_owned
        todo = [(plan.scheduled, False)]
        live = self.scheduler.requests
        while todo:
            part, halved = todo.pop()
            part = [item for item in part if item.request.request_id in live]
            if not part:
                continue
            error = self._compute(part, updates, first_try=not failures)
            if error is None:
                computed += len(part)
                continue
            failures += 1
            short = is_out_of_memory(error)
            if not short and len(part) > 1:
                todo += [(half, False) for half in reversed(halve_requests(part))]
            elif short and not halved and sum(item.num_tokens for item in part) > 1:
                todo += [(half, True) for half in reversed(halve_tokens(part))]
            else:
                victim = largest(part).request
                message = "request %s failed in a model step: %r"
                logger.error(message, victim.request_id, error, extra=victim.log_fields)
                self.scheduler.finish(victim)
                updates.append(_failed(victim, error, "model step"))
                todo.append((part, False))
        if computed:
            # A request whose chunk was cut was computed twice.
            self._count_step(min(computed, len(plan.scheduled)), owned)

    def _compute(
        self, part: list[ScheduledTokens], updates: list[TokenUpdate], first_try: bool
    ) -> BaseException | None:
        """Run requests of a step; returns why that failed, without having changed anything."""
        plan = StepPlan(part)
        try:
            output = self.runner.execute(plan)
        except BaseException as error:
            _forget_draws(part)
            if not isinstance(error, Exception) or is_beyond_repair(error):
                raise
            if first_try:
                message = "a step of %d requests failed and is tried in parts: %s"
                trace = not is_out_of_memory(error)
                logger.warning(message, len(part), error, exc_info=trace)
            failure = without_frames(error)
        else:
            self.scheduler.update(plan)
            self._append(plan, output, updates)
            return None
        release_memory(self.runner.device)
        return failure

    def _append(self, plan: StepPlan, output: SamplerOutput, updates: list[TokenUpdate]) -> None:
        now = time.perf_counter()
        prompts = output.prompt_logprobs
        row = 0
        for item in plan.scheduled:
            request = item.request
            self._count_tokens(item)
            update = TokenUpdate(request)
            read = prompts.get(request.request_id) if prompts else None
            if read is not None:
                update.prompt_logprobs = None if read.fault else read.entries
                update.error = read.fault
                more = read.next_position < request.prompt_len - 1
                request.next_prompt_logits = read.next_position if more else None
            if item.samples:
                update.error = update.error or output.errors.get(row)
                if update.error is None:
                    self._append_token(update, output, row, now)
                row += 1
            if update.error is not None:
                update.finish_reason = "error"
            if update.finish_reason is not None:
                self.scheduler.finish(request)
            if update.token_ids or update.prompt_logprobs or update.finish_reason:
                updates.append(update)

    def _count_step(self, computed: int, owned: int) -> None:
        self._stats.steps += 1
        self._stats.running_sum += computed
        self._stats.blocks_owned_sum += owned

    def _count_tokens(self, item: ScheduledTokens) -> None:
        if item.num_tokens > 1 or not item.samples or not item.request.num_output_tokens:
            self._stats.prefill_tokens += item.num_tokens
            self._step.prefill_tokens += item.num_tokens
        else:
            self._step.decode_tokens += 1

    def _append_token(
        self, update: TokenUpdate, output: SamplerOutput, row: int, now: float
    ) -> None:
        request, token = update.request, output.token_ids[row]
        request.token_ids.append(token)
        request.payload.output_token_ids.append(token)
        if request.last_token_time is None:
            request.first_token_time = now
            self._step.first_token_seconds.append(now - request.arrival_time)
        else:
            self._step.inter_token_seconds.append(now - request.last_token_time)
        request.last_token_time = now
        self._stats.generated_tokens += 1
        update.token_ids.append(token)
        logprobs = output.logprobs[row] if output.logprobs else None
        if logprobs is not None:
            update.logprobs = [logprobs]
        self._check_end(request, token, update)

    def _check_end(self, request: Request, token: int, update: TokenUpdate) -> None:
        params: SamplingParams = request.payload.params
        generated = request.num_output_tokens
        if generated >= params.min_tokens:
            if not params.ignore_eos and token in self.runner.model_config.eos_token_ids:
                update.finish_reason = "stop"
                return
            if params.stop_token_ids and token in params.stop_token_ids:
                update.finish_reason, update.stop_reason = "stop", token
                return
        if generated >= request.max_tokens:
            update.finish_reason = "length"

    # ------------------------------------------------------------------ observation and end

    @property
    def last_step(self) -> StepStats:
        """What happened in the last step."""
        return self._stats.last_step

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        s, scheduler = self._stats, self.scheduler
        s.running = len(scheduler.running)
        s.waiting = len(scheduler.waiting)
        s.compressing = len(scheduler.jobs)
        s.swapped = len(self.runner.swap)
        pool = scheduler.pool
        s.blocks_total, s.blocks_owned = pool.num_blocks, pool.num_owned
        s.blocks_cached, s.blocks_free = pool.num_cached, pool.num_free
        s.query_slots_total = scheduler.config.num_query_slots
        s.query_slots_in_use = scheduler.num_query_slots_in_use
        counters = scheduler.counters
        s.compressions, s.evicted_tokens = counters.compressions, counters.evicted_tokens
        s.preemptions_recompute = counters.preemptions_recompute
        s.preemptions_swap = counters.preemptions_swap
        s.stalls_resolved = counters.stalls_resolved
        s.prefix_cache_queries = scheduler.prefix_cache.queries
        s.prefix_cache_hits = scheduler.prefix_cache.hits
        s.forward_seconds = self.runner.forward_seconds
        return EngineStats(**vars(s))

    def check_integrity(self) -> None:
        """Check that blocks, slots and rows add up (see `Scheduler.check_integrity`)."""
        self.scheduler.check_integrity()
        assert len(self.runner.swap) == sum(1 for r in self.scheduler.waiting if r.compressed), (
            "host copies without a swapped request"
        )

    def shutdown(self, failed: bool = False) -> None:
        """Abort everything and release the compression thread.

        Args:
            failed: a step raised, so that the bookkeeping may be broken and is left alone.
        """
        try:
            for request_id in [] if failed else list(self.scheduler.requests):
                self.scheduler.abort(request_id)
        finally:
            self._in_flight = None
            self._executor.shutdown()
        if not failed:
            self._collect(self._executor.poll(), [])


def _forget_draws(part: Iterable[ScheduledTokens]) -> None:
    """Take back the draws of a step that failed, whether or not it had come to them."""
    for item in part:
        item.request.payload.sampling.num_sampled = item.request.num_output_tokens


def _failed(request: Request, error: BaseException, where: str) -> TokenUpdate:
    cause = f"{where} failed: {type(error).__name__}: {error}"
    return TokenUpdate(request, finish_reason="error", error=cause)
