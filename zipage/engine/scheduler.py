"""Who runs next, with which blocks and query slots. Pure bookkeeping: no tensors, no threads.

The scheduler owns every request between `add` and its end. One engine step is

1. `plan_compressions`: requests whose cache is full get target blocks and become COMPRESSING;
2. `finish_compression` for every compression that ended;
3. `schedule`: which requests compute how many tokens;
4. `update`: the tokens were computed; full blocks become findable.

Requests are ordered by (priority, arrival). A request may only take blocks from requests behind it,
so the first one can always run, and any set of requests that each fit the pool alone finishes.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zipage.cache.block_pool import BlockPool
from zipage.cache.prefix_cache import PrefixCache
from zipage.compression.job import CompressionJob
from zipage.compression.planner import make_job, new_blocks, plan_targets, surplus_blocks
from zipage.engine.request import Request, RequestStatus
from zipage.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler; all in blocks, tokens or requests.

    `admission` is ``"bounded"`` (a compressible request starts only if the worst case of all
    running compressible requests still fits, so that they are practically never preempted) or
    ``"optimistic"`` (it starts when its known tokens fit).
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_query_slots: int = 0
    enable_prefix_caching: bool = True
    admission: str = "bounded"


@dataclass(frozen=True)
class SwapMove:
    """One swapped request: copy these blocks and, if not None, this query slot."""

    request: Request
    block_ids: tuple[int, ...]
    query_slot: int | None


@dataclass
class ScheduledTokens:
    """`num_tokens` of a request are computed in this step, from its first pending one on."""

    request: Request
    num_tokens: int
    #: Whether the step reaches the last known token, so that a new one is sampled.
    samples: bool


@dataclass
class StepPlan:
    """What one forward pass computes. Swaps are carried out before it: first out, then in."""

    scheduled: list[ScheduledTokens] = field(default_factory=list)
    swap_outs: list[SwapMove] = field(default_factory=list)
    swap_ins: list[SwapMove] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(s.num_tokens for s in self.scheduled)


@dataclass
class SchedulerCounters:
    """Totals since the start."""

    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    compressions: int = 0
    evicted_tokens: int = 0
    stalls_resolved: int = 0


class Scheduler:
    """Continuous batching over a pool of blocks with bounded requests. See the module docstring."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.prefix_cache = PrefixCache(
            self.pool, config.block_size, enabled=config.enable_prefix_caching
        )
        self.counters = SchedulerCounters()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.jobs: dict[str, CompressionJob] = {}
        #: Called with a swapped request that ends before it is swapped in.
        self.on_swap_dropped: Callable[[Request], None] = lambda request: None
        self._free_slots = list(range(config.num_query_slots - 1, -1, -1))
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._arrivals = itertools.count()
        self._swapped: dict[str, tuple[int, bool]] = {}
        self._pending_swap_outs: list[SwapMove] = []
        self._blocked = False
        self._compression_blocked = False
        self._budget_left = 0

    # ------------------------------------------------------------------ submission and end

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never fit the pool, or its id is in use.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is already in use")
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty: at least one token is needed")
        needed = request.worst_case_blocks
        if needed > self.config.num_blocks:
            raise RequestError(self._never_fits(request, needed))
        if request.trigger is not None and not self.config.num_query_slots:
            raise RequestError("a request with a kv_budget needs at least one query slot")
        request.arrival_index = next(self._arrivals)
        self.requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _never_fits(self, request: Request, needed: int) -> str:
        b, pool = self.config.block_size, self.config.num_blocks
        advice = "raise the KV pool's size or lower max_tokens"
        if request.max_blocks is None:
            advice += ", or give the request a kv_budget"
        elif request.max_blocks > pool:
            advice += ", or lower kv_budget"
        elif not request.bounded_prefill:
            advice += ", or switch bounded_prefill on"
        return (
            f"the request can never fit: {request.prompt_len} prompt tokens and up to "
            f"{request.max_tokens} generated ones need {needed} blocks of {b} tokens at once, "
            f"the pool has {pool} ({pool * b} tokens); {advice}"
        )

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; returns it, or None if it is unknown or ended.

        If its compression is in flight, its blocks are released when that ends.
        """
        request = self.requests.get(request_id)
        if request is None or request.aborted:
            return None
        if request.status is RequestStatus.COMPRESSING:
            request.aborted = True
        else:
            self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """End a request and release everything it holds."""
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
            self.waiting.remove(request)
            if self._swapped.pop(request.request_id, None) is not None:
                self.on_swap_dropped(request)
        else:
            raise ValueError(f"request {request.request_id} can't finish from {request.status}")
        request.status = RequestStatus.FINISHED
        request.finish_time = time.perf_counter()
        del self.requests[request.request_id]

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.set_blocks([])
        self._release_slot(request)
        self._free_rows.append(request.row)
        request.row = -1

    def _release_slot(self, request: Request) -> None:
        if request.query_slot is not None:
            self._free_slots.append(request.query_slot)
            request.query_slot = None

    # ------------------------------------------------------------------ compression

    def plan_compressions(self) -> list[CompressionJob]:
        """Start every compression that is due and for which blocks are available."""
        jobs = []
        self._compression_blocked = False
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or not request.compression_due:
                continue
            plan = plan_targets(request, self.pool, headroom=len(self.running))
            while plan.num_new > self.pool.num_available and self._make_room(request):
                plan = plan_targets(request, self.pool, headroom=len(self.running))
            if plan.num_new > self.pool.num_available:
                self._compression_blocked = True
                continue
            job = make_job(request, plan, self.pool)
            request.status = RequestStatus.COMPRESSING
            self.jobs[request.request_id] = job
            jobs.append(job)
        return jobs

    def finish_compression(self, request_id: str) -> Request:
        """A compression ended: the request continues in its target blocks, the rest is released."""
        job = self.jobs.pop(request_id)
        request = self.requests[request_id]
        self.counters.compressions += 1
        self.counters.evicted_tokens += job.length - job.keep
        self.pool.release(surplus_blocks(job))
        request.on_compressed(list(job.target_blocks), job.keep)
        self._release_slot(request)
        request.status = RequestStatus.RUNNING
        if request.aborted:
            self.finish(request)
        return request

    def fail_compression(self, request_id: str) -> Request:
        """A compression failed: its request ends, and all its blocks are released."""
        job = self.jobs.pop(request_id)
        request = self.requests[request_id]
        self.pool.release(new_blocks(job))
        request.status = RequestStatus.RUNNING
        self.finish(request)
        return request

    # ------------------------------------------------------------------ scheduling

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next forward pass.

        The plan may be empty while compressions run, when one has become possible since they were
        planned, or after a preemption that resolves a stall.
        """
        plan = StepPlan()
        self._blocked = self._compression_blocked
        self._schedule_running(plan)
        if self.running and not plan.scheduled and not self.jobs and not self._can_compress():
            # Nothing can run and nothing is in flight: the last request is preempted, and the next
            # step tries again. (Nothing is admitted now, or it would come straight back.)
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request {self.running[0].request_id} is stuck though it runs alone"
                )
            self.counters.stalls_resolved += 1
            self._preempt(self.running[-1])
        elif not self._blocked:
            self._admit(plan)
        plan.swap_outs = self.take_swap_outs()
        return plan

    def _can_compress(self) -> bool:
        """Whether a request that waits for its compression could start it now: those in its way may
        have ended after `plan_compressions`."""
        return any(
            request.compression_due
            and plan_targets(request, self.pool, headroom=len(self.running)).num_new
            <= self.pool.num_available
            for request in self.running
        )

    def take_swap_outs(self) -> list[SwapMove]:
        """Swap-outs to be carried out before anything is written to the pool."""
        moves, self._pending_swap_outs = self._pending_swap_outs, []
        return moves

    def _schedule_running(self, plan: StepPlan) -> None:
        budget = self.config.max_num_batched_tokens
        decodes = sum(
            1 for r in self.running if r.num_pending == 1 and r.status is RequestStatus.RUNNING
        )
        # Decodes come first: a long prompt must not stall everybody else's stream.
        prefill_budget = max(budget - decodes, min(budget, self.config.block_size))
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            i += 1
            if request.status is not RequestStatus.RUNNING:
                continue
            limit = budget if request.num_pending == 1 else min(budget, prefill_budget)
            count = self._grant(request, limit)
            if count:
                self._append(plan, request, count)
                budget -= count
                if request.num_pending > 1:
                    prefill_budget -= count
        self._budget_left = min(budget, prefill_budget)

    def _append(self, plan: StepPlan, request: Request, count: int) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.perf_counter()
            if logger.isEnabledFor(logging.DEBUG):
                cached = request.cached_prompt_tokens or 0
                logger.debug(
                    "request %s is scheduled: %d of its %d tokens in this step, %d were cached",
                    request.request_id,
                    count,
                    len(request.token_ids),
                    cached,
                    extra={**request.log_fields, "cached_prompt_tokens": cached},
                )
        plan.scheduled.append(ScheduledTokens(request, count, count == request.num_pending))

    def _grant(self, request: Request, limit: int, may_preempt: bool = True) -> int:
        """Allocate blocks and a slot for up to `limit` tokens; returns how many the request may
        compute now, 0 if it must wait."""
        count = min(request.num_pending, limit)
        trigger = request.trigger
        if trigger is not None:
            count = min(count, trigger - request.length)
            window_start = trigger - request.window
            if request.length + count > window_start and request.query_slot is None:
                if self._free_slots:
                    request.query_slot = self._free_slots.pop()
                else:
                    count = min(count, window_start - request.length)
        if count <= 0:
            return 0
        b = self.config.block_size
        owned = len(request.block_ids)
        needed = -(-(request.length + count) // b) - owned
        if needed <= 0:
            return count
        if needed > self.pool.num_available:
            count = min(count, (owned + self.pool.num_available) * b - request.length)
            if count <= 0:
                count = 1
                while not self.pool.num_available:
                    if not may_preempt or not self._make_room(request):
                        self._blocked = True
                        return 0
            needed = -(-(request.length + count) // b) - owned
        request.block_ids.extend(self.pool.allocate(needed))
        request.peak_blocks = max(request.peak_blocks, len(request.block_ids))
        return count

    # ------------------------------------------------------------------ preemption

    def _make_room(self, request: Request) -> bool:
        """Preempt a request behind `request`; False if it must wait instead.

        A compression in flight that writes to new blocks briefly holds more than was reserved for
        its request: waiting for that surplus is enough. This happens once per request, as later
        compressions are in place.
        """
        if any(new_blocks(job) for job in self.jobs.values()):
            return False
        return self._preempt_behind(request)

    def _preempt_behind(self, request: Request) -> bool:
        """Free blocks by preempting one request behind `request`; False if there is none.

        Uncompressed requests without a query slot go first, then uncompressed ones with a slot,
        then compressed ones; the newest of each class first.
        """
        victim = None
        for candidate in reversed(self.running):
            if candidate is request:
                break
            if candidate.status is not RequestStatus.RUNNING or not candidate.block_ids:
                continue
            if victim is None or self._cost(candidate) < self._cost(victim):
                victim = candidate
        if victim is None:
            return False
        self._preempt(victim)
        return True

    @staticmethod
    def _cost(request: Request) -> int:
        if request.compressed:
            return 2
        return 0 if request.query_slot is None else 1

    def _preempt(self, request: Request) -> None:
        kind = "swap" if request.compressed else "recompute"
        logger.debug(
            "request %s is preempted (%s) and gives back %d blocks",
            request.request_id,
            kind,
            len(request.block_ids),
            extra={**request.log_fields, "preemption": kind},
        )
        request.preemptions += 1
        if request.compressed:
            self.counters.preemptions_swap += 1
            request.swaps += 1
            move = SwapMove(request, tuple(request.block_ids), request.query_slot)
            self._pending_swap_outs.append(move)
            self._swapped[request.request_id] = (
                len(request.block_ids),
                request.query_slot is not None,
            )
            self._leave_running(request)
            request.status = RequestStatus.SWAPPED
        else:
            self.counters.preemptions_recompute += 1
            self._leave_running(request)
            request.reset_cache()
            request.status = RequestStatus.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    # ------------------------------------------------------------------ admission

    def _admit(self, plan: StepPlan) -> None:
        if not self.waiting or not self._free_rows:
            return
        budget = self._budget_left
        filled = self._blocks_filled(plan.scheduled)
        i = 0  # requests passed over because they wait for a prefix; each keeps a row reserved
        while i < len(self.waiting) and i < len(self._free_rows) and budget > 0:
            request = self.waiting[i]
            if request.status is RequestStatus.SWAPPED:
                admitted = self._admit_swapped(request, plan)
            else:
                hits, block_hash = self._match(request)
                if filled.get(block_hash, request.order) < request.order:
                    i += 1
                    continue
                admitted = self._admit_fresh(request, hits, budget)
            if not admitted:
                break
            self.waiting.pop(i)
            request.status = RequestStatus.RUNNING
            request.row = self._free_rows.pop()
            bisect.insort(self.running, request, key=lambda r: r.order)
            # Requests behind this one may already be in the plan, so they keep their blocks.
            count = self._grant(request, budget, may_preempt=False)
            if count:
                self._append(plan, request, count)
                budget -= count
                for key, order in self._blocks_filled(plan.scheduled[-1:]).items():
                    filled[key] = min(order, filled.get(key, order))

    def _blocks_filled(self, items: list[ScheduledTokens]) -> dict[bytes, tuple[int, int]]:
        """Hashes of the prompt blocks that these items write to, with the order of the first
        request that does so.

        A request behind it that needs such a block next waits for it instead of computing and
        storing the same. It never waits for a request that gets no tokens in this step, so
        somebody always makes progress.
        """
        filled: dict[bytes, tuple[int, int]] = {}
        if not self.prefix_cache.enabled:
            return filled
        b = self.config.block_size
        for item in items:
            request = item.request
            first = request.length // b
            last = min(-(-(request.length + item.num_tokens) // b), request.prompt_len // b)
            if first >= last or request.compressed:
                continue
            hashes = request.block_hashes
            self.prefix_cache.extend_hashes(hashes, request.token_ids, last, request.salt)
            for key in hashes[first:last]:
                filled[key] = min(request.order, filled.get(key, request.order))
        return filled

    def _match(self, request: Request) -> tuple[list[int], bytes]:
        """The cached blocks a request can start from, and the hash of the next one that it could
        share (b"" if there is none)."""
        # The last known token is always computed, for logits to sample from, and so are the
        # tokens of the window, for queries to score with.
        most = request.num_pending - 1
        if request.trigger is not None:
            most = min(most, request.trigger - request.window)
        if request.next_prompt_logits is not None:
            most = min(most, request.next_prompt_logits)
        most //= self.config.block_size
        hashes = request.block_hashes
        hits = self.prefix_cache.match(hashes, request.token_ids, most, request.salt)
        more = len(hits) < most and self.prefix_cache.enabled
        return hits, hashes[len(hits)] if more else b""

    def _admit_swapped(self, request: Request, plan: StepPlan) -> bool:
        count, had_slot = self._swapped[request.request_id]
        if had_slot and not self._free_slots:
            return False
        if not self._fits(request, [], count):
            return False
        del self._swapped[request.request_id]
        request.set_blocks(self.pool.allocate(count))
        if had_slot:
            request.query_slot = self._free_slots.pop()
        plan.swap_ins.append(SwapMove(request, tuple(request.block_ids), request.query_slot))
        return True

    def _admit_fresh(self, request: Request, hits: list[int], budget: int) -> bool:
        b = self.config.block_size
        known = request.num_pending
        if request.trigger is not None:
            known = min(known, request.trigger)
        first = min(known - len(hits) * b, budget)
        needed = -(-(len(hits) * b + first) // b) - len(hits)
        if not self._fits(request, hits, needed):
            return False
        for block in hits:
            self.pool.acquire(block)
        request.set_blocks(list(hits))
        request.num_computed = request.length = len(hits) * b
        if request.cached_prompt_tokens is None:
            request.cached_prompt_tokens = len(hits) * b
            self.prefix_cache.record(request.prompt_len, len(hits) * b)
        return True

    def _fits(self, request: Request, hits: list[int], needed_now: int) -> bool:
        """Whether to admit a request that takes over the cached blocks `hits` and allocates
        `needed_now` more at once."""
        unowned = sum(1 for block in hits if self.pool.ref_count(block) == 0)
        available = self.pool.num_available - unowned
        if needed_now > available:
            return False
        if not self.running:
            return True
        if request.trigger is None:
            # It keeps the hits until it ends, so their other owners must replace them.
            own = self._reserved(request) - len(hits)
            shared = frozenset(hits)
            growth = sum(self._growth(r, shared) for r in self.running)
        else:
            own = self._reserved(request) - unowned
            growth = sum(self._growth(r) for r in self.running)
        return growth + max(own, needed_now) <= available

    def _reserved(self, request: Request) -> int:
        """Blocks reserved for a request: its worst case under bounded admission if a budget bounds
        it, else those of its known tokens and the next one."""
        known = -(-(request.length + request.num_pending + 1) // self.config.block_size)
        known = min(known, request.worst_case_blocks)
        if request.max_blocks is None or self.config.admission != "bounded":
            return known
        return request.worst_case_blocks

    def _growth(self, request: Request, shared: frozenset[int] = frozenset()) -> int:
        """Blocks a running request may still take from the pool within its reservation, if the
        blocks `shared` had another owner."""
        reserved = self._reserved(request)
        if request.trigger is None:
            return max(0, reserved - len(request.block_ids))
        # A block with other owners is replaced at the compression, but not returned to the pool.
        return max(0, reserved - self.pool.num_private(request.block_ids, shared))

    # ------------------------------------------------------------------ after the step

    def update(self, plan: StepPlan) -> None:
        """The tokens of a plan were computed; their full blocks become findable."""
        b = self.config.block_size
        for item in plan.scheduled:
            request = item.request
            before = request.length
            request.length += item.num_tokens
            request.num_computed += item.num_tokens
            first, last = before // b, request.length // b
            if first != last and not request.compressed:
                self.prefix_cache.register(
                    request.block_hashes,
                    request.token_ids,
                    request.block_ids,
                    first,
                    last,
                    request.salt,
                )

    @property
    def token_budget_left(self) -> int:
        """Prompt tokens for which the last plan still had room."""
        return self._budget_left

    @property
    def num_query_slots_in_use(self) -> int:
        """Query slots leased now."""
        return self.config.num_query_slots - len(self._free_slots)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is queued, running or being compressed."""
        return bool(self.requests)

    def check_integrity(self) -> None:
        """Check the invariants of blocks, slots and rows.

        Raises:
            AssertionError: one of them does not hold.
        """
        owners = []
        for request in self.running:
            blocks = list(request.block_ids)
            job = self.jobs.get(request.request_id)
            if job is not None:
                blocks += new_blocks(job)
            owners.append(blocks)
            if request.compressed and request.max_blocks is not None:
                assert len(request.block_ids) <= request.max_blocks, request.request_id
            assert request.length <= len(request.block_ids) * self.config.block_size
        self.pool.check_integrity(owners)
        slots = [r.query_slot for r in self.running if r.query_slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.config.num_query_slots))
        rows = [r.row for r in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs))
        assert sorted(map(id, self.requests.values())) == sorted(
            map(id, [*self.running, *self.waiting])
        )
        assert set(self._swapped) == {
            r.request_id for r in self.waiting if r.status is RequestStatus.SWAPPED
        }
        for request in self.waiting:
            assert not request.block_ids and request.query_slot is None
