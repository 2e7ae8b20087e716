"""The bookkeeping as a state machine: hypothesis looks for the shortest way to break it."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from zipage.engine.request import Request
from zipage.engine.scheduler import SchedulerConfig

from .fake_engine import FakeEngine
from .random_schedules import step_limit, submit
from .solo import Ask

PREFIXES = ([], [1, 2, 3], list(range(40)), [1, 2, 3, *range(50, 70)])


class Bookkeeping(RuleBasedStateMachine):
    """One engine; requests arrive, are aborted, and compressions end or fail at any moment."""

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from((4, 4, 4, 5, 7, 8, 16)),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from((64, 17, 8, 3, 1, 256)),
        num_query_slots=st.integers(1, 3),
        enable_prefix_caching=st.booleans(),
        admission=st.sampled_from(("bounded", "optimistic")),
        compaction=st.sampled_from(("stable", "holes")),
        asynchronous=st.booleans(),
        window_share=st.integers(1, 16),
    )
    def start(
        self, compaction: str, asynchronous: bool, window_share: int, **options: object
    ) -> None:
        config = SchedulerConfig(**options)  # type: ignore[arg-type]
        self.failing = False
        self.engine = FakeEngine(
            config,
            compaction=compaction,
            # An asynchronous compression ends when the rule says so, or when nothing else can run.
            delay=lambda: 10**6 if asynchronous else 0,
            fails=lambda: self.failing,
            rng=random.Random(0),
        )
        self.window = min(window_share, config.block_size)
        self.accepted: list[Request] = []
        self.names = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 40),
        tail=st.lists(st.integers(0, 3), max_size=12),
        max_tokens=st.integers(1, 60),
        max_blocks=st.none() | st.integers(2, 5),
        bounded_prefill=st.booleans(),
        priority=st.sampled_from((0, 0, 0, -1, 1)),
        samples=st.sampled_from((1, 1, 1, 2, 3)),
        salt=st.sampled_from((b"", b"", b"tenant")),
    )
    def add(
        self, prefix: list[int], shared: int, tail: list[int], samples: int, **options: object
    ) -> None:
        if len(self.engine.scheduler.requests) + samples > 12:
            return
        ask = Ask(
            prompt=(*prefix[:shared], *tail) or (7,),
            window=self.window,
            seed=self.names,
            **options,  # type: ignore[arg-type]
        )
        self.names += 1
        group: list[Request] = []
        for sample in range(samples):
            submit(self.engine, f"r{self.names}.{sample}", ask, group)
        self.accepted += group

    @rule(steps=st.sampled_from((1, 2, 5, 12, 30)))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        engine = self.engine
        plan = engine.step()
        if not engine.scheduler.has_unfinished:
            engine.steps -= 1
        elif not plan.scheduled and engine.in_flight:
            # Nothing else can run: the engine waits for a compression.
            engine.finish_compression(next(iter(engine.in_flight)))
        assert engine.steps <= step_limit(self.accepted), engine.describe()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(which=st.integers(0, 11))
    def abort(self, which: int) -> None:
        names = list(self.engine.scheduler.requests)
        self.engine.abort(names[which % len(names)])

    @precondition(lambda self: self.engine.in_flight)
    @rule(which=st.integers(0, 11), failing=st.sampled_from((False, False, False, True)))
    def finish_compression(self, which: int, failing: bool) -> None:
        names = list(self.engine.in_flight)
        self.failing = failing
        self.engine.finish_compression(names[which % len(names)])
        self.failing = False

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.scheduler.has_unfinished:
            self.step()
        self.engine.check_drained()
        self.engine.check_texts()
        assert sorted(self.engine.ended) == sorted(r.request_id for r in self.accepted)


Bookkeeping.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestBookkeeping = Bookkeeping.TestCase
