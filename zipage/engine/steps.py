"""Executing step plans: ahead of the running step or one by one; in parts after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from zipage.engine.core_io import TokenUpdate
from zipage.engine.request import PENDING_TOKEN, Request, RequestStatus
from zipage.engine.scheduler import ScheduledTokens, Scheduler, StepPlan
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
from zipage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    """A step running on the device; its tokens are `PENDING_TOKEN` in the requests.

    Attributes:
        sample: the launched sample that yields its tokens.
        requests: request, row of the sample, and whether the token is its last one by length.
        rows: request id to the request's row when it was launched.
    """

    sample: LaunchedSample
    requests: list[tuple[Request, int, bool]]
    rows: dict[str, int]


class StepRunner:
    """Runs steps on the model and updates requests.

    With `ahead` a step is queued while the one before it still runs: that step's tokens stay on
    the device, where the next step finds them, and are read on the host one step later. A request
    that ends by length leaves at once; one that ends by a stop token is computed once more than
    needed, and the surplus token is dropped. Blocks released while a step still uses them are
    safe: their next owner writes to them later in the device's order.

    Args:
        runner: the model.
        scheduler: owns the requests.
        stats: counters to update.
        ahead: queue steps ahead where their requests permit it.

    Attributes:
        numbers: numbers of the current step; an interrupted step leaves them to the next.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, stats: EngineStats, ahead: bool
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._stats = stats
        self._ahead = ahead
        self._in_flight: _InFlight | None = None
        self.numbers = StepStats()

    @property
    def has_unread(self) -> bool:
        """Whether the device holds tokens that a request waits for."""
        return bool(self._in_flight and self._in_flight.requests)

    def forget(self, request_id: str) -> None:
        """Drop the unread token of a request that ends."""
        if self._in_flight is None:
            return
        for i, (request, _, _) in enumerate(self._in_flight.requests):
            if request.request_id == request_id:
                request.token_ids.pop()
                del self._in_flight.requests[i]
                return

    def discard(self) -> None:
        """Forget the step in flight."""
        self._in_flight = None

    def run(self, plan: StepPlan, updates: list[TokenUpdate]) -> bool:
        """Carry out a plan; False if there was nothing to do.

        Appends the results to `updates`; those of a step that was only queued come with the next
        call.
        """
        if plan.scheduled and self._ahead and self._can_launch(plan):
            self._launch(plan, updates)
            return True
        settled = self._settle(updates)
        self.drop_ended(plan)
        if plan.scheduled:
            self._execute(plan, updates)
        return settled or bool(plan.scheduled)

    def drop_ended(self, plan: StepPlan) -> None:
        """Take requests that have ended out of a plan."""
        live = self._scheduler.requests
        plan.scheduled = [item for item in plan.scheduled if item.request.request_id in live]

    # ------------------------------------------------------------------ ahead

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
        return self._runner.can_launch(plan.scheduled)

    def _launch(self, plan: StepPlan, updates: list[TokenUpdate]) -> None:
        """Queue the step, then read the tokens of the one before it."""
        sampling = [item.request for item in plan.scheduled if item.samples]
        rows = {request.request_id: request.row for request in sampling}
        sample = self._try_launch(plan, updates)
        if sample is None:
            self._settle(updates)
            self.drop_ended(plan)
            if plan.scheduled:
                self._execute(plan, updates)
            return
        owned = self._scheduler.pool.num_owned
        try:
            self._settle(updates)
        except BaseException:
            # Interrupted while waiting for the device: the step just queued is without effect, but
            # it has replaced the tokens on the device.
            _forget_draws(plan.scheduled)
            if self._in_flight is not None:
                self._in_flight.rows.clear()
            raise
        self.drop_ended(plan)
        self._scheduler.update(plan)
        self._count_step(len(plan.scheduled), owned)
        live = self._scheduler.requests
        for item in plan.scheduled:
            self._count_tokens(item)
        pending = []
        for row, request in enumerate(sampling):
            if request.request_id not in live:
                continue
            request.token_ids.append(PENDING_TOKEN)
            last = request.num_output_tokens >= request.max_tokens
            if last:
                self._scheduler.finish(request)
            pending.append((request, row, last))
        self._in_flight = _InFlight(sample, pending, rows)

    def _try_launch(self, plan: StepPlan, updates: list[TokenUpdate]) -> LaunchedSample | None:
        """Queue the step; None if that failed, without side effects: it is then run again with all
        tokens known, so that it can be split."""
        try:
            return self._runner.launch(plan, lambda: self._settle(updates))
        except BaseException as error:
            _forget_draws(plan.scheduled)
            if not isinstance(error, Exception) or is_beyond_repair(error):
                raise
            message = "a step of %d requests could not be queued: %r"
            logger.warning(message, len(plan.scheduled), error)
        # Only here is the error unreferenced, whose frames keep the step's tensors alive.
        release_memory(self._runner.device)
        return None

    def _settle(self, updates: list[TokenUpdate]) -> bool:
        """Read the tokens of the step in flight; returns whether there was one."""
        flight = self._in_flight
        if flight is None:
            return False
        output = flight.sample.wait()
        now = time.perf_counter()
        while flight.requests:
            request, row, last = flight.requests[0]
            if last or request.status is not RequestStatus.FINISHED:
                self._read(request, output, row, last, now, updates)
            else:
                request.token_ids.pop()  # it ended meanwhile
            del flight.requests[0]
        self._in_flight = None
        return True

    def _read(
        self,
        request: Request,
        output: SamplerOutput,
        row: int,
        last: bool,
        now: float,
        updates: list[TokenUpdate],
    ) -> None:
        """Replace a `PENDING_TOKEN` of the step in flight by its token."""
        update = TokenUpdate(request.request_id, error=output.errors.get(row))
        request.token_ids.pop()
        if update.error is None:
            self._append_token(request, update, output, row, now)
        else:
            self._scheduler.prefix_cache.forget(request.block_hashes)
            update.finish_reason = "error"
        if update.finish_reason is not None and not last:
            # Not `finish`: its compression may have started.
            self._scheduler.abort(request.request_id)
        updates.append(update)

    # ------------------------------------------------------------------ step by step

    def _execute(self, plan: StepPlan, updates: list[TokenUpdate]) -> None:
        """Run the step; after an exception run it again in parts, to isolate the failing requests.

        A step writes only the new slots of its requests, which are not read before their lengths
        are updated, so any part of it can be computed again. After an exception the requests are
        bisected, down to the one that fails alone and ends. When out of memory, the part is
        halved once by tokens; if that is not enough, its largest request ends and the rest starts
        over.
        """
        computed = failures = 0
        owned = self._scheduler.pool.num_owned
        todo = [(plan.scheduled, False)]
        live = self._scheduler.requests
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
                self._scheduler.finish(victim)
                updates.append(failed_update(victim, error, "model step"))
                todo.append((part, False))
        if computed:
            # A request whose chunk was split was computed twice.
            self._count_step(min(computed, len(plan.scheduled)), owned)

    def _compute(
        self, part: list[ScheduledTokens], updates: list[TokenUpdate], first_try: bool
    ) -> BaseException | None:
        """Run requests of a step; returns the error if that failed, without side effects."""
        plan = StepPlan(part)
        try:
            output = self._runner.execute(plan)
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
            self._scheduler.update(plan)
            self._append(plan, output, updates)
            return None
        release_memory(self._runner.device)
        return failure

    def _append(self, plan: StepPlan, output: SamplerOutput, updates: list[TokenUpdate]) -> None:
        now = time.perf_counter()
        prompts = output.prompt_logprobs
        row = 0
        for item in plan.scheduled:
            request = item.request
            self._count_tokens(item)
            update = TokenUpdate(request.request_id)
            read = prompts.get(request.request_id) if prompts else None
            if read is not None:
                update.prompt_logprobs = None if read.fault else read.entries
                update.error = read.fault
                more = read.next_position < request.prompt_len - 1
                request.next_prompt_logits = read.next_position if more else None
            if item.samples:
                update.error = update.error or output.errors.get(row)
                if update.error is None:
                    self._append_token(request, update, output, row, now)
                row += 1
            if update.error is not None:
                # Its blocks may be as broken as its logits.
                self._scheduler.prefix_cache.forget(request.block_hashes)
                update.finish_reason = "error"
            if update.finish_reason is not None:
                self._scheduler.finish(request)
            if update.token_ids or update.prompt_logprobs or update.finish_reason:
                updates.append(update)

    def _count_step(self, computed: int, owned: int) -> None:
        self._stats.steps += 1
        self._stats.running_sum += computed
        self._stats.blocks_owned_sum += owned

    def _count_tokens(self, item: ScheduledTokens) -> None:
        if item.num_tokens > 1 or not item.samples or not item.request.num_output_tokens:
            self._stats.prefill_tokens += item.num_tokens
            self.numbers.prefill_tokens += item.num_tokens
        else:
            self.numbers.decode_tokens += 1

    def _append_token(
        self, request: Request, update: TokenUpdate, output: SamplerOutput, row: int, now: float
    ) -> None:
        token = output.token_ids[row]
        request.token_ids.append(token)
        request.payload.output_token_ids.append(token)
        if request.last_token_time is None:
            request.first_token_time = now
            self.numbers.first_token_seconds.append(now - request.arrival_time)
        else:
            self.numbers.inter_token_seconds.append(now - request.last_token_time)
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
        form = request.payload.sampling.form
        if form is not None:
            form.advance()
        if generated >= params.min_tokens or (form is not None and form.ended):
            if not params.ignore_eos and token in self._runner.model_config.eos_token_ids:
                update.finish_reason = "stop"
                return
            if token in params.stop_token_id_set:
                update.finish_reason, update.stop_reason = "stop", token
                return
        if form is not None and form.complete:
            update.finish_reason = "stop"
            return
        if generated >= request.max_tokens:
            update.finish_reason = "length"


def _forget_draws(part: Iterable[ScheduledTokens]) -> None:
    """Undo the draws of a step that failed, whether or not it had reached them."""
    for item in part:
        item.request.payload.sampling.num_sampled = item.request.num_output_tokens


def failed_update(request: Request, error: BaseException, where: str) -> TokenUpdate:
    """The end of a request because of `error`."""
    cause = f"{where} failed: {type(error).__name__}: {error}"
    return TokenUpdate(request.request_id, finish_reason="error", error=cause)
