"""An engine without a model: it moves the integers of `solo.py` where the real one moves keys and
values, along the block tables, slots and swaps that the scheduler plans, and checks every write."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from zipage.cache.block_pool import BlockPool
from zipage.compression.job import CompressionJob
from zipage.compression.planner import new_blocks
from zipage.engine.request import Request, RequestStatus
from zipage.engine.scheduler import ScheduledTokens, Scheduler, SchedulerConfig, StepPlan, SwapMove

from .solo import Ask, compact, content_of, next_token, solo_run, stops, survivors

GARBAGE = -1


@dataclass
class InFlight:
    """A compression that runs beside the steps."""

    job: CompressionJob
    request: Request
    contents: list[int]
    window: list[int]
    steps_left: int


@dataclass
class FakeEngine:
    """Executes what the scheduler plans and checks every write against the invariants.

    Attributes:
        compaction: ``"stable"`` or ``"holes"``.
        delay: steps a compression takes; 0 is synchronous.
        fails: whether a compression fails.
        finish_first: poll for ended compressions before planning new ones, instead of after.
        between: called in the middle of a step, after new compressions were started.
    """

    config: SchedulerConfig
    compaction: str = "stable"
    delay: Callable[[], int] = lambda: 0
    fails: Callable[[], bool] = lambda: False
    finish_first: bool = False
    between: Callable[[], None] = lambda: None
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        c = self.config
        self.scheduler = Scheduler(c)
        self.scheduler.on_swap_dropped = self._drop_swap
        self.pool: BlockPool = self.scheduler.pool
        self.block_size = c.block_size
        self.cache = [[GARBAGE] * c.block_size for _ in range(c.num_blocks)]
        #: As the score and position store: written by compressions, read by the next one.
        self.stored = [[GARBAGE] * c.block_size for _ in range(c.num_blocks)]
        self.queries: list[list[int]] = [[] for _ in range(c.num_query_slots)]
        self.swapped: dict[str, tuple[list[list[int]], list[list[int]], list[int] | None]] = {}
        self.in_flight: dict[str, InFlight] = {}
        self.position_of: dict[int, int] = {}
        self.checked_hash: list[bytes | None] = [None] * c.num_blocks
        self.content_of_hash: dict[bytes, tuple[int, ...]] = {}
        self.compressed: dict[str, list[list[int]]] = {}
        self.ended: dict[str, Request] = {}
        self.reasons: dict[str, str] = {}
        self.steps = 0
        self.idle_steps = 0
        self.schedule_log: list[list[tuple[str, int]]] = []

    # ------------------------------------------------------------------ requests

    def add(self, request_id: str, ask: Ask) -> Request:
        """Submit a request; RequestError if the scheduler refuses it."""
        request = Request(
            request_id,
            list(ask.prompt),
            max_tokens=ask.max_tokens,
            block_size=self.block_size,
            max_blocks=ask.max_blocks,
            window=ask.window,
            priority=ask.priority,
            bounded_prefill=ask.bounded_prefill,
            salt=ask.salt,
            payload=ask,
        )
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request, whatever it is doing."""
        request = self.scheduler.abort(request_id)
        if request is not None and request.status is RequestStatus.FINISHED:
            self._end(request, "aborted")

    def _end(self, request: Request, reason: str) -> None:
        assert request.request_id not in self.ended, "a request ends once"
        assert request.request_id not in self.scheduler.requests
        assert not request.block_ids and request.query_slot is None and request.row == -1
        assert request.request_id not in self.swapped, "host memory of an ended request leaks"
        self.ended[request.request_id] = request
        self.reasons[request.request_id] = reason

    def _drop_swap(self, request: Request) -> None:
        del self.swapped[request.request_id]

    # ------------------------------------------------------------------ one step

    def step(self) -> StepPlan:
        """One engine step, then all checks."""
        running_before = list(self.scheduler.running)
        preemptions_before = {id(r): r.preemptions for r in running_before}
        if self.finish_first:
            self._poll()
        jobs = self.scheduler.plan_compressions()
        for move in self.scheduler.take_swap_outs():
            self._swap_out(move)
        for job in jobs:
            self._start(job)
        self.between()
        if not self.finish_first:
            self._poll()
        waiting_before = set(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        self._check_oldest(running_before, preemptions_before)
        self._check_nothing_twice(plan, waiting_before)
        self.execute(plan)
        self.finish_step(plan)
        self.check()
        return plan

    def execute(self, plan: StepPlan) -> None:
        """The forward pass: writes the cache and remembers each sampled token."""
        self._check_plan(plan)
        for move in plan.swap_outs:
            self._swap_out(move)
        self._scramble_free_blocks()
        for move in plan.swap_ins:
            self._swap_in(move)
        # The batch runs at once: no request may depend on what another one writes in this step.
        order = list(plan.scheduled)
        self.rng.shuffle(order)
        self.sampled = {}
        for item in order:
            visible = self._compute(item)
            if item.samples:
                self.sampled[item.request.request_id] = next_token(item.request.payload, visible)

    def finish_step(self, plan: StepPlan) -> None:
        """Tell the scheduler, append the sampled tokens, end what is finished."""
        self.scheduler.update(plan)
        self.steps += 1
        self.idle_steps += not plan.scheduled
        self.schedule_log.append([(s.request.request_id, s.num_tokens) for s in plan.scheduled])
        for item in plan.scheduled:
            request = item.request
            if item.samples and request.status is not RequestStatus.FINISHED:
                token = self.sampled[request.request_id]
                request.token_ids.append(token)
                if request.num_output_tokens == request.max_tokens or stops(request.payload, token):
                    self.scheduler.finish(request)
                    self._end(request, "finished")

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left, within `max_steps` steps, and check what came out."""
        last = self.steps + max_steps
        while self.scheduler.has_unfinished:
            self.step()
            assert self.steps <= last, f"more than {max_steps} steps: {self.describe()}"
        self.check_drained()
        self.check_texts()

    # ------------------------------------------------------------------ forward pass

    def _compute(self, item: ScheduledTokens) -> int:
        request, b = item.request, self.block_size
        full, rest = divmod(request.length, b)
        visible = sum(sum(self.cache[block]) for block in request.block_ids[:full])
        if rest:
            visible += sum(self.cache[request.block_ids[full]][:rest])
        slot, position = request.length, request.num_computed
        for token in request.token_ids[position : position + item.num_tokens]:
            content = content_of(request.payload, position, token, visible)
            block = request.block_ids[slot // b]
            self._assert_writable(block)
            self.cache[block][slot % b] = content
            self.position_of[content] = position
            visible += content
            self._capture(request, slot, content)
            slot, position = slot + 1, position + 1
        return visible

    def _capture(self, request: Request, slot: int, content: int) -> None:
        if request.trigger is None:
            return
        index = slot - (request.trigger - request.window)
        if index >= 0:
            assert request.query_slot is not None, "a window token is computed without a slot"
            assert index < request.window, "a token is computed behind the trigger"
            store = self.queries[request.query_slot]
            store.extend([GARBAGE] * (request.window - len(store)))
            store[index] = content

    def _assert_writable(self, block: int) -> None:
        assert self.pool.ref_count(block) == 1, f"block {block} is written with several owners"
        assert self.pool.block_hash(block) is None, f"block {block} is written with a live hash"

    # ------------------------------------------------------------------ swaps

    def _swap_out(self, move: SwapMove) -> None:
        request = move.request
        assert request.request_id not in self.swapped
        slot = None if move.query_slot is None else list(self.queries[move.query_slot])
        self.swapped[request.request_id] = (
            [list(self.cache[b]) for b in move.block_ids],
            [list(self.stored[b]) for b in move.block_ids],
            slot,
        )

    def _swap_in(self, move: SwapMove) -> None:
        cache, stored, slot = self.swapped.pop(move.request.request_id)
        assert len(move.block_ids) == len(cache)
        assert (move.query_slot is None) == (slot is None)
        for block, contents, scores in zip(move.block_ids, cache, stored, strict=True):
            self._assert_writable(block)
            self.cache[block] = contents
            self.stored[block] = scores
        if slot is not None:
            self.queries[move.query_slot] = slot

    # ------------------------------------------------------------------ compressions

    def _start(self, job: CompressionJob) -> None:
        request = self.scheduler.requests[job.request_id]
        b = self.block_size
        assert request.max_blocks is not None
        assert job.source_blocks == tuple(request.block_ids)
        assert job.length == request.length == len(job.source_blocks) * b or (
            request.compressions == 0 and -(-job.length // b) == len(job.source_blocks)
        )
        assert job.keep == (request.max_blocks - 1) * b == len(job.target_blocks) * b < job.length
        assert len(set(job.target_blocks)) == len(job.target_blocks)
        for source, target in zip(job.source_blocks, job.target_blocks, strict=False):
            assert target == source or target not in job.source_blocks
        if request.compressed:
            assert not new_blocks(job), "a compressed request owns more than its budget"
        for block in job.target_blocks:
            self._assert_writable(block)

        contents = [c for block in job.source_blocks for c in self.cache[block]][: job.length]
        positions = [self.position_of[c] for c in contents]
        first = job.num_tokens - job.length
        assert positions[job.num_scored :] == [
            first + t for t in range(job.num_scored, job.length)
        ], "unscored slots hold other positions than their number says"
        stored = [c for block in job.source_blocks for c in self.stored[block]]
        assert stored[: job.num_scored] == contents[: job.num_scored], "stored scores are stale"
        window = list(self.queries[job.query_slot][: request.window])
        assert window == contents[-request.window :], "the query slot misses window tokens"
        assert [self.position_of[c] for c in window] == list(
            range(job.num_tokens - request.window, job.num_tokens)
        )
        self.in_flight[job.request_id] = InFlight(job, request, contents, window, self.delay())
        # From here on nobody may read the targets: they may be half written.
        for block in job.target_blocks:
            self.cache[block] = [GARBAGE] * b
            self.stored[block] = [GARBAGE] * b

    def _poll(self) -> None:
        for request_id, running in list(self.in_flight.items()):
            running.steps_left -= 1
            if running.steps_left < 0:
                self.finish_compression(request_id)

    def finish_compression(self, request_id: str) -> None:
        """The compression ends now."""
        flight = self.in_flight.pop(request_id)
        job, request, b = flight.job, flight.request, self.block_size
        targets = set(job.target_blocks)
        for i, block in enumerate(job.source_blocks):
            part = flight.contents[i * b : (i + 1) * b]
            if block not in targets:
                assert self.cache[block][: len(part)] == part, "a source block was overwritten"
        for block in job.target_blocks:
            self._assert_writable(block)
            assert self.cache[block] == [GARBAGE] * b, "a target block was written by another"
        if self.fails():
            self.scheduler.fail_compression(request_id)
            self._end(request, "failed")
            return
        kept = survivors(flight.contents, flight.window, job.keep, job.compression_index)
        cache = compact(flight.contents, kept, self.compaction)
        assert len(cache) == job.keep
        for i, block in enumerate(job.target_blocks):
            self.cache[block] = cache[i * b : (i + 1) * b]
            self.stored[block] = cache[i * b : (i + 1) * b]
        self.compressed.setdefault(request_id, []).append(cache)
        self.scheduler.finish_compression(request_id)
        if request.aborted:
            self._end(request, "aborted")

    # ------------------------------------------------------------------ checks

    def _check_oldest(self, before: list[Request], preemptions: dict[int, int]) -> None:
        """A request is only ever preempted by an older one, which is not."""
        stayed = [r for r in before if r.preemptions == preemptions[id(r)]]
        for request in before:
            if request.preemptions > preemptions[id(request)]:
                assert any(r.order < request.order for r in stayed), request.request_id

    def _check_nothing_twice(self, plan: StepPlan, waiting: set[Request]) -> None:
        """No request is admitted to compute a block that one before it computes in this step."""
        if not self.config.enable_prefix_caching:
            return
        for item in plan.scheduled:
            one, b = item.request, self.block_size
            end = (one.length // b + 1) * b
            most = min(len(one.token_ids) - 1, (one.trigger or 10**9) - one.window)
            if one.next_prompt_logits is not None:
                most = min(most, one.next_prompt_logits)
            if one not in waiting or one.compressed or end > most:
                continue
            for other, count in ((s.request, s.num_tokens) for s in plan.scheduled):
                assert not (
                    other.order < one.order
                    and not other.compressed
                    and other.length < end <= other.prompt_len
                    and other.length + count > end - b
                    and other.payload.salt == one.payload.salt
                    and other.token_ids[:end] == one.token_ids[:end]
                ), f"{one.request_id} computes what {other.request_id} does"

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        seen = {id(s.request) for s in plan.scheduled}
        assert len(seen) == len(plan.scheduled), "a request is scheduled twice"
        for item in plan.scheduled:
            request = item.request
            assert request.status is RequestStatus.RUNNING
            assert 0 < item.num_tokens <= request.num_pending
            assert item.samples == (item.num_tokens == request.num_pending)
            assert request.length + item.num_tokens <= len(request.block_ids) * self.block_size
        for move in plan.swap_ins:
            assert move.request in self.scheduler.running
            assert move.request.block_ids[: len(move.block_ids)] == list(move.block_ids)

    def _scramble_free_blocks(self) -> None:
        for block in range(self.config.num_blocks):
            if (
                self.cache[block][0] != GARBAGE
                and self.pool.ref_count(block) == 0
                and self.pool.block_hash(block) is None
            ):
                self.cache[block] = [GARBAGE] * self.block_size
                self.stored[block] = [GARBAGE] * self.block_size

    def check(self) -> None:
        """Invariants that hold after every step, besides `Scheduler.check_integrity`."""
        s = self.scheduler
        s.check_integrity()
        owned = {block for request in s.running for block in request.block_ids}
        for request in s.running:
            compressing = request.request_id in s.jobs
            assert compressing == (request.status is RequestStatus.COMPRESSING)
            assert compressing == (request.request_id in self.in_flight)
            if compressing:
                owned.update(s.jobs[request.request_id].target_blocks)
            else:
                assert request.status is RequestStatus.RUNNING and not request.aborted
            assert len(request.block_ids) <= request.worst_case_blocks
            if request.compressed:
                assert len(request.block_ids) <= (request.max_blocks or 0)
                assert not request.block_hashes
                assert not any(map(self.pool.is_shared, request.block_ids))
            assert request.query_slot is None or request.trigger is not None
            assert request.length <= request.num_computed < len(request.token_ids)
        assert self.pool.num_free + self.pool.num_cached + len(owned) == self.config.num_blocks
        for request in s.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED)
            assert (request.status is RequestStatus.SWAPPED) == (request.request_id in self.swapped)
            assert (request.status is RequestStatus.SWAPPED) == request.compressed
        for queue in (s.running, s.waiting):
            assert all(x.order < y.order for x, y in itertools.pairwise(queue))
        for block in range(self.config.num_blocks):
            block_hash = self.pool.block_hash(block)
            if block_hash is not self.checked_hash[block]:
                self._check_hashed(block, block_hash)

    def _check_hashed(self, block: int, block_hash: bytes | None) -> None:
        """The same hash always stands for the same contents."""
        self.checked_hash[block] = block_hash
        if block_hash is not None:
            contents = tuple(self.cache[block])
            assert GARBAGE not in contents, f"block {block} became findable before it was written"
            known = self.content_of_hash.setdefault(block_hash, contents)
            assert known == contents, f"block {block} does not hold what its hash says"

    def check_drained(self) -> None:
        """Nothing is left of any request."""
        s = self.scheduler
        assert not s.requests and not s.running and not s.waiting and not s.jobs
        assert not self.swapped and not self.in_flight
        assert self.pool.num_owned == 0
        assert s.num_query_slots_in_use == 0
        s.check_integrity()
        for block in range(self.config.num_blocks):
            self._check_hashed(block, self.pool.block_hash(block))
        assert self.pool.num_free + self.pool.num_cached == self.config.num_blocks

    def check_texts(self) -> None:
        """Every ended request had the text and the caches of its solo run, up to its end."""
        for request_id, request in self.ended.items():
            text, caches = solo_run(request.payload, self.block_size, self.compaction)
            seen = self.compressed.get(request_id, [])
            if self.reasons[request_id] == "finished":
                assert request.token_ids == text, f"{request_id} differs from its solo run"
                assert len(seen) == len(caches)
            assert request.token_ids == text[: len(request.token_ids)], request_id
            assert seen == caches[: len(seen)], f"{request_id} kept other tokens"

    def describe(self) -> str:
        """The queues, for the message of a failure."""

        def line(r: Request) -> str:
            return (
                f"{r.request_id}:{r.status.value} length={r.length} pending={r.num_pending} "
                f"blocks={len(r.block_ids)} trigger={r.trigger} slot={r.query_slot} "
                f"preemptions={r.preemptions}"
            )

        s = self.scheduler
        return (
            f"running {[line(r) for r in s.running]} waiting {[line(r) for r in s.waiting]} "
            f"free={self.pool.num_free} cached={self.pool.num_cached} {s.counters}"
        )


def make_engine(delay: int = 0, compaction: str = "stable", **options: object) -> FakeEngine:
    """A small engine, ample unless `options` of the scheduler say otherwise."""
    config: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "num_query_slots": 4,
    }
    config.update(options)
    return FakeEngine(
        SchedulerConfig(**config),  # type: ignore[arg-type]
        compaction=compaction,
        delay=lambda: delay,
    )
