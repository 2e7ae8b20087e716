"""The engine core: schedule, execute, update. One thread; tokens in, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zipage.compression.executor import CompressionOutcome, make_executor
from zipage.compression.job import CompressionJob
from zipage.compression.retention import count_keepers
from zipage.config import EngineConfig
from zipage.engine.core_io import EngineRequest, ModelInfo, TokenUpdate
from zipage.engine.request import Request
from zipage.engine.scheduler import Scheduler, SchedulerConfig, SwapMove
from zipage.engine.sequence import SequenceState
from zipage.engine.stats import EngineStats, StepStats
from zipage.engine.steps import StepRunner, failed_update
from zipage.errors import RequestError
from zipage.execution.answer_form import AnswerForm
from zipage.execution.faults import is_beyond_repair
from zipage.execution.grammar import GrammarCompiler
from zipage.execution.model_runner import ModelRunner, current_device, resolve_device
from zipage.execution.sampler import SamplingState
from zipage.observe.trace import TraceRecorder
from zipage.outputs import RequestMetrics
from zipage.sampling_params import SamplingParams
from zipage.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


class EngineCore:
    """Generates tokens for requests under Compressed PagedAttention.

    Not thread-safe: one thread calls all methods.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        with current_device(resolve_device(config.device)):
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
        model = self.runner.model_config
        #: Replaced by a compiler that shares the tokenizer where one is loaded already.
        self.grammars = GrammarCompiler(self._load_tokenizer, model.vocab_size, model.eos_token_ids)
        self._executor = make_executor(self._compress, asynchronous, self.runner.device)
        self._stats = EngineStats()
        ahead = config.schedules_ahead(self.runner.device.type)
        self._steps = StepRunner(self.runner, self.scheduler, self._stats, ahead)
        #: Notified of every step while a trace is recorded.
        self.recorder: TraceRecorder | None = None
        #: Answers whose end has not been reported yet, by sequence id.
        self._requests: dict[str, Request] = {}
        #: Updates of the running step so far; an interrupted step leaves them to the next.
        self._updates: list[TokenUpdate] = []

    def model_info(self) -> ModelInfo:
        """What callers need to know about the model and the pool."""
        runner, tokenizer = self.runner, self.config.tokenizer
        if tokenizer is None and runner.model_path is not None:
            tokenizer = str(runner.model_path)
        return ModelInfo(
            max_model_len=runner.max_model_len,
            vocab_size=runner.model_config.vocab_size,
            eos_token_ids=tuple(runner.model_config.eos_token_ids),
            num_kv_blocks=self.scheduler.config.num_blocks,
            tokenizer=None if tokenizer is None else str(tokenizer),
            default_sampling=runner.model_config.default_sampling(),
        )

    # ------------------------------------------------------------------ requests

    def submit(self, request: EngineRequest) -> None:
        """Queue the answers of a request. After an exception some may be queued: abort them.

        Raises:
            RequestError: the request could never run, see `Scheduler.add`.
        """
        for index, sequence_id in enumerate(request.sequence_ids):
            sequence = self._make_sequence(request, index)
            self.scheduler.add(sequence)
            self._requests[sequence_id] = sequence
        if self.recorder is not None:
            for index, sequence_id in enumerate(request.sequence_ids):
                name = request.request_id
                self.recorder.submitted(
                    self._requests[sequence_id], f"{name}#{index}" if request.params.n > 1 else name
                )

    def _make_sequence(self, request: EngineRequest, index: int) -> Request:
        params, runner = request.params, self.runner
        output: list[int] = []
        sampling = SamplingState(
            params,
            request.prompt_token_ids,
            output,
            runner.model_config.eos_token_ids,
            runner.model_config.vocab_size,
            index,
            self._answer_form(params, output),
        )
        reads_prompt = (
            params.prompt_logprobs is not None and index == 0 and len(request.prompt_token_ids) > 1
        )
        return Request(
            request_id=request.sequence_ids[index],
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            block_size=self.config.block_size,
            max_blocks=request.max_blocks,
            window=self.config.resolved_window,
            priority=request.priority,
            bounded_prefill=self.config.bounded_prefill,
            salt=request.cache_salt.encode(),
            # One answer reads the prompt's logits for all of them.
            next_prompt_logits=0 if reads_prompt else None,
            report_kept=params.return_kv_stats or self.recorder is not None,
            external_id=request.request_id,
            payload=SequenceState(params, sampling, request.stream, output),
            arrival_time=request.arrival_time,
        )

    def _answer_form(self, params: SamplingParams, output: list[int]) -> AnswerForm | None:
        form, model = params.structured_outputs, self.runner.model_config
        if form is None:
            return None
        eos = [token_id for token_id in model.eos_token_ids if token_id < model.vocab_size]
        ends = params.stop_token_id_set.union(() if params.ignore_eos else eos)
        compiled = self.grammars.compile(form)
        return AnswerForm(compiled, form, output, ends, eos, params.min_tokens)

    def _load_tokenizer(self) -> Any:
        source = self.model_info().tokenizer
        if source is None:
            raise RequestError("structured_outputs needs a tokenizer")
        return load_tokenizer(source, self.config.revision)

    def abort(self, sequence_id: str) -> RequestMetrics | None:
        """End an answer now; returns its metrics, None if it is unknown or has ended."""
        self._steps.forget(sequence_id)
        self.scheduler.abort(sequence_id)
        request = self._requests.pop(sequence_id, None)
        return None if request is None else request.metrics()

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_unfinished or self._steps.has_unread

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self.scheduler.waiting)

    # ------------------------------------------------------------------ the step

    def step(self) -> list[TokenUpdate]:
        """One engine step; returns updates of the requests it touched.

        A failure of a compression, a swap or the forward pass ends the requests it touched with
        finish reason ``error``; the others are not affected.
        """
        with current_device(self.runner.device):
            return self._run_step()

    def _run_step(self) -> list[TokenUpdate]:
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
        self._steps.drop_ended(plan)  # by a failed swap
        if not self._steps.run(plan, updates) and self.scheduler.jobs:
            self._collect(self._executor.wait(), updates)
        ended = time.perf_counter()
        stats, step = self._stats, self._steps.numbers
        step.index = stats.last_step.index + 1
        step.seconds = ended - started
        step.num_running = len(plan.scheduled)
        stats.step_seconds += step.seconds
        stats.last_step, self._steps.numbers = step, StepStats()
        self._updates = []
        if recorder is not None:
            recorder.step_ended(step, self.scheduler, plan.scheduled, started, planned, ended)
        self._add_metrics(updates)
        if self._requests and not self.has_unfinished:
            lost = sorted({str(request.external_id) for request in self._requests.values()})
            raise RuntimeError(f"requests {lost} were lost")
        return updates

    def _add_metrics(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            request = self._requests.get(update.sequence_id)
            if request is None:
                continue  # aborted after an interruption
            if update.finish_reason is not None:
                del self._requests[update.sequence_id]
                update.metrics = request.metrics()
            elif update.token_ids and request.payload.stream:
                update.metrics = request.metrics()

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
                updates.append(failed_update(move.request, error, "swap"))

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
                self._compressed(outcome, updates)
                continue
            request = self.scheduler.fail_compression(outcome.request_id)
            logger.error(
                "compression of request %s failed",
                outcome.request_id,
                exc_info=outcome.error,
                extra=request.log_fields,
            )
            if not request.aborted:
                updates.append(failed_update(request, outcome.error, "compression"))

    def _compressed(self, outcome: CompressionOutcome, updates: list[TokenUpdate]) -> None:
        job = self.scheduler.jobs[outcome.request_id]
        request = self.scheduler.finish_compression(outcome.request_id)
        request.compression_seconds += outcome.seconds
        self._steps.numbers.compression_seconds.append(outcome.seconds)
        record = None
        if outcome.kept is not None:
            params = request.payload.params
            by_layer = params.kv_stats_layers
            record = count_keepers(outcome.kept, job, outcome.seconds, by_layer)
            if params.return_kv_stats:
                updates.append(TokenUpdate(request.request_id, kv_stats=[record]))
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
        s.memory = self.runner.memory_plan
        return EngineStats(**vars(s))

    def check_integrity(self) -> None:
        """Check that blocks, slots and rows add up (see `Scheduler.check_integrity`)."""
        self.scheduler.check_integrity()
        assert len(self.runner.swap) == sum(1 for r in self.scheduler.waiting if r.compressed), (
            "host copies without a swapped request"
        )

    def shutdown(self, failed: bool = False) -> None:
        """Abort everything; release the compression thread, weights and KV pool.

        Args:
            failed: a step raised, so the bookkeeping may be broken and is left alone.
        """
        try:
            self._release(failed)
        except Exception as error:
            # A lost device refuses this too; the step that lost it has reported that already.
            if not (failed and is_beyond_repair(error)):
                raise

    def _release(self, failed: bool) -> None:
        try:
            try:
                for request_id in [] if failed else list(self.scheduler.requests):
                    self.scheduler.abort(request_id)
            finally:
                self._steps.discard()
                self._executor.shutdown()
            if not failed:
                self._collect(self._executor.poll(), [])
        finally:
            self.runner.close()
