"""Random workloads on random engines, each decided by one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from zipage.engine.request import Request
from zipage.engine.scheduler import SchedulerConfig
from zipage.errors import RequestError

from .fake_engine import FakeEngine
from .solo import Ask

#: Steps the slowest compression takes.
SLOWEST_COMPRESSION = 12


@dataclass
class Totals:
    """What a number of schedules did, to see that they reach what they are meant to test."""

    schedules: int = 0
    requests: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    steps: int = 0
    tokens: int = 0
    compressions: int = 0
    recomputed: int = 0
    swapped: int = 0
    stalls: int = 0
    cached_tokens: int = 0
    most_of_step_limit: float = 0.0

    def add(self, engine: FakeEngine) -> None:
        """Count one finished engine."""
        counters = engine.scheduler.counters
        reasons = list(engine.reasons.values())
        self.schedules += 1
        self.requests += len(reasons)
        self.finished += reasons.count("finished")
        self.aborted += reasons.count("aborted")
        self.failed += reasons.count("failed")
        self.steps += engine.steps
        self.tokens += sum(len(r.token_ids) for r in engine.ended.values())
        self.compressions += counters.compressions
        self.recomputed += counters.preemptions_recompute
        self.swapped += counters.preemptions_swap
        self.stalls += counters.stalls_resolved
        self.cached_tokens += sum(r.cached_prompt_tokens or 0 for r in engine.ended.values())


def random_config(rng: random.Random) -> SchedulerConfig:
    """A small engine: 4-40 blocks of 4-16 tokens, 1-3 query slots."""
    block_size = rng.choice((4, 4, 4, 5, 6, 8, 16))
    return SchedulerConfig(
        num_blocks=rng.randint(4, rng.choice((8, 14, 40))),
        block_size=block_size,
        max_num_seqs=rng.choice((1, 2, 4, 6, 12, 12)),
        max_num_batched_tokens=rng.choice((1, 2, 3, block_size, 2 * block_size, 20, 64, 256)),
        num_query_slots=rng.choice((1, 1, 2, 3)),
        enable_prefix_caching=rng.random() < 0.7,
        admission=rng.choice(("bounded", "optimistic", "optimistic")),
    )


def random_asks(rng: random.Random, config: SchedulerConfig, count: int) -> list[Ask]:
    """Requests with shared prefixes, with and without a budget.

    A crowd is a set of requests that all grow far beyond the pool.
    """
    b = config.block_size
    crowd = rng.random() < 0.5
    texts = [[rng.randrange(100) for _ in range(8 * b)]]
    texts.append([rng.randrange(100) for _ in range(b)] + texts[0][b:])
    window = rng.randint(1, b)
    max_blocks = rng.randint(2, 6)
    if crowd:
        max_blocks = rng.randint(2, max(2, min(6, config.num_blocks // 2)))
    compressible = rng.choice((0.5, 0.8, 1.0))
    stop_one_in = rng.choice((0, 0, 20))
    asks = []
    for i in range(count):
        shared = rng.choice((0, 1, b, rng.randint(0, (2 if crowd else 4) * b)))
        own = rng.choice((0, 1, rng.randint(0, (1 if crowd else 3) * b)))
        prompt = rng.choice(texts)[:shared] + [rng.randrange(100) for _ in range(own)]
        has_budget = rng.random() < compressible
        longest = config.num_blocks * b - len(prompt) if crowd else 40
        if has_budget and crowd:
            longest = (max_blocks + 3) * b
        max_tokens = rng.choice((1, rng.randint(1, b), rng.randint(1, 40)))
        asks.append(
            Ask(
                prompt=tuple(prompt or [7]),
                max_tokens=min(100, max(1, longest)) if crowd else max_tokens,
                max_blocks=max_blocks + rng.choice((0, 0, 1)) if has_budget else None,
                window=window,
                priority=rng.choice((0, 0, 0, 0, 1, -1)),
                bounded_prefill=rng.random() < 0.3,
                salt=rng.choice((b"", b"", b"", b"x")),
                seed=rng.choice((0, i)),
                stop_one_in=stop_one_in,
            )
        )
    return asks


def random_engine(rng: random.Random, config: SchedulerConfig) -> FakeEngine:
    """An engine with synchronous, slow or failing compressions."""
    slowest = rng.choice((0, 0, 1, 3, SLOWEST_COMPRESSION))
    failure_rate = rng.choice((0.0, 0.0, 0.0, 0.1))
    return FakeEngine(
        config,
        compaction=rng.choice(("stable", "holes")),
        delay=lambda: rng.randint(0, slowest),
        fails=lambda: rng.random() < failure_rate,
        finish_first=rng.random() < 0.5,
        rng=rng,
    )


def step_limit(requests: list[Request]) -> int:
    """Steps after which a set of requests must have ended.

    The oldest running request computes a token, waits for a compression in flight (of itself or
    of somebody whose blocks or slot it needs), or waits for a slot whose holder moves on. So each
    token is counted once, and each compression that may happen with all its steps.
    """
    total = 20
    for r in requests:
        tokens = r.prompt_len + r.max_tokens
        total += tokens
        if r.max_blocks is not None:
            total += (SLOWEST_COMPRESSION + 2) * (tokens // r.block_size + 1)
    return total


def run_schedule(seed: int, totals: Totals) -> FakeEngine:
    """Run the workload of a seed to its end; every check of the engine applies."""
    rng = random.Random(seed)
    config = random_config(rng)
    engine = random_engine(rng, config)
    asks = random_asks(rng, config, rng.randint(1, 12))
    abort_rate = rng.choice((0.0, 0.0, 0.03, 0.2))
    arrival_rate = rng.choice((1.0, 0.7, 0.2))

    def disturb() -> None:
        if rng.random() < abort_rate and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))

    engine.between = disturb
    accepted: list[Request] = []
    while asks or engine.scheduler.has_unfinished:
        while asks and rng.random() < arrival_rate:
            group: list[Request] = []
            same = asks[-rng.choice((1, 1, 1, 3, 8)) :]
            del asks[-len(same) :]
            for sample in range(len(same)):
                name = f"r{len(asks)}.{sample}"
                totals.refused += not submit(engine, name, same[0], group)
            accepted += group
        disturb()
        engine.step()
        # Not the engine's fault: there was nothing to do, or it ended in this step.
        engine.steps -= not engine.scheduler.has_unfinished
        assert engine.steps <= step_limit(accepted), f"seed {seed}: {engine.describe()}"
    engine.check_drained()
    engine.check_texts()
    assert sorted(engine.ended) == sorted(r.request_id for r in accepted)
    totals.add(engine)
    if accepted:
        limit = step_limit(accepted)
        totals.most_of_step_limit = max(totals.most_of_step_limit, engine.steps / limit)
    return engine


def submit(engine: FakeEngine, name: str, ask: Ask, group: list[Request]) -> bool:
    """Add a sample of a prompt; False if it is refused, which may only happen if it needs more
    blocks than there are."""
    sample = replace(ask, seed=ask.seed + 1000 * len(group))
    tokens = len(ask.prompt) + ask.max_tokens - 1
    if ask.max_blocks is not None:
        first = 0 if ask.bounded_prefill else len(ask.prompt)
        tokens = min(tokens, max(first, ask.max_blocks * engine.block_size))
    fits = tokens <= engine.config.num_blocks * engine.block_size
    try:
        request = engine.add(name, sample)
    except RequestError as error:
        assert not fits, f"refused though it fits: {error}"
        return False
    assert fits, "accepted though it can never fit"
    group.append(request)
    return True
