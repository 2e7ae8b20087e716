"""The same problems in the same KV memory, answered with full KV and with compression."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from zipage.config import FULL, EngineConfig
from zipage.engine.request import RequestStatus
from zipage.engine.stats import EngineStats
from zipage.errors import ConfigError
from zipage.evals.problems import Problem, count_tokens
from zipage.evals.runner import Answer
from zipage.execution.memory import pool_bytes
from zipage.llm import LLM
from zipage.sampling_params import SamplingParams

#: One in this many requests is streamed, so that its reasoning can be shown.
_STREAMED_EVERY = 4
#: Tokens the chat template adds to a prompt, and tokens of a reply after its chain of thought.
_TEMPLATE_TOKENS, _CLOSING_TOKENS = 10, 16


@dataclass(frozen=True)
class Side:
    """One of the two contestants.

    Attributes:
        name: display name.
        options: engine options; `run_side` sets those of the memory.
    """

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Owner:
    """A request and its blocks in the pool."""

    request_id: str
    blocks: int
    compressing: bool


@dataclass(frozen=True)
class Snapshot:
    """The state of a running side, for watchers."""

    name: str
    stats: EngineStats
    seconds: float
    total: int
    finished: int
    right: int
    owners: tuple[Owner, ...]
    reasoning: str


class Watcher(Protocol):
    """Shows a side while it runs."""

    def due(self, now: float) -> bool:
        """Whether to call `show`; `now` is `time.perf_counter()`."""

    def show(self, snapshot: Snapshot) -> None:
        """Show it."""


@dataclass(frozen=True)
class SideResult:
    """A side's result; `wall_seconds` is from the submission of the batch to its end."""

    name: str
    wall_seconds: float
    kv_bytes: int
    stats: EngineStats
    answers: tuple[Answer, ...] = field(repr=False)

    @property
    def right(self) -> int:
        """Number of correct answers."""
        return sum(a.right for a in self.answers)

    @property
    def failed(self) -> int:
        """Requests that ended with an error."""
        return sum(a.finish_reason in ("error", "abort") for a in self.answers)

    @property
    def accuracy(self) -> float:
        """Percentage of correct answers."""
        return 100 * self.right / len(self.answers)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all replies; tokens generated again after a preemption count once."""
        return sum(a.tokens for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time."""
        return self.generated_tokens / self.wall_seconds

    @property
    def peak_blocks(self) -> int:
        """Most blocks one request owned."""
        return max(a.peak_blocks for a in self.answers)

    @property
    def summary(self) -> str:
        """The run in one line."""
        return (
            f"{self.name}: {self.right}/{len(self.answers)} right in {self.wall_seconds:.1f} s, "
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"{self.stats.mean_running:.1f} requests per step"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "right": self.right,
            "total": len(self.answers),
            "failed": self.failed,
            "wall_seconds": round(self.wall_seconds, 3),
            "generated_tokens": self.generated_tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "kv_bytes": self.kv_bytes,
            "peak_blocks": self.peak_blocks,
            "mean_running": round(self.stats.mean_running, 2),
            "engine": asdict(self.stats),
            "answers": [asdict(a) for a in self.answers],
        }


def full_side(engine_options: Mapping[str, Any], block_size: int) -> Side:
    """Full KV: requests grow until the pool is full, then some are preempted."""
    return Side("full KV", {**engine_options, "block_size": block_size, "compression": FULL})


def zipage_side(
    engine_options: Mapping[str, Any], kv_budget: int, block_size: int, pool_tokens: int
) -> Side:
    """Zipage's default policy with a budget in tokens.

    It gets as many query slots as its requests can need: a request holds a slot for the last
    `window` of every `block_size` tokens, and twice that share of the requests is ample.
    """
    own = {"block_size": block_size, "compression": "zipage", "kv_budget": kv_budget}
    options = {**engine_options, **own}
    window = EngineConfig.from_options(options).resolved_window
    running = pool_tokens / (kv_budget + block_size)
    slots = max(1, math.ceil(running * min(1.0, 2 * window / block_size)))
    return Side("Zipage", {**options, "num_query_slots": slots})


def longest_prompt(problems: Sequence[Problem]) -> int:
    """Tokens of the longest prompt, chat template included."""
    return max(count_tokens(p.prompt) for p in problems) + _TEMPLATE_TOKENS


def reply_limit(problems: Sequence[Problem], pool_tokens: int) -> int:
    """Most tokens of a reply, the same for both sides.

    A quarter more than the longest reference reply, if the pool can hold that in full: a longer
    reply has gone astray.

    Args:
        problems: all problems.
        pool_tokens: tokens of full KV that the pool holds.

    Raises:
        ConfigError: the pool can't hold the longest problem in full KV.
    """
    prompt, reply = longest_prompt(problems), max(p.cot_tokens for p in problems) + _CLOSING_TOKENS
    if prompt + reply > pool_tokens:
        raise ConfigError(
            f"pool_tokens={pool_tokens} is too small: full KV must be able to hold the longest "
            f"problem, up to {prompt} prompt and {reply} reply tokens; give at least "
            f"{prompt + reply}"
        )
    return min(pool_tokens - prompt, reply + reply // 4)


def warm_up(sides: Sequence[Side]) -> None:
    """Load the model and the kernels once, so that neither side pays for it."""
    for side in sides:
        with LLM(**{**side.options, "num_kv_blocks": 64}) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))


def run_side(
    side: Side,
    problems: Sequence[Problem],
    *,
    pool: Mapping[str, int],
    max_tokens: int,
    watcher: Watcher,
) -> SideResult:
    """Answer all problems greedily in one batch.

    Args:
        side: the side to run.
        problems: the problems, in order of arrival.
        pool: ``num_kv_blocks``, or ``kv_cache_memory`` in bytes.
        max_tokens: most tokens of a reply.
        watcher: shows the run.
    """
    with LLM(**{**side.options, **pool}) as llm:
        engine = llm.engine
        scheduler = engine.core.scheduler
        prompts = llm.chat_prompts([[{"role": "user", "content": p.prompt}] for p in problems])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        by_id: dict[str, Problem] = {}
        answers: dict[str, Answer] = {}
        texts: dict[str, str] = {}
        reasoning = ""
        started = time.perf_counter()
        for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            request_id = engine.add_request(prompt, params, stream=i % _STREAMED_EVERY == 0)
            by_id[request_id] = problem
        while len(answers) < len(by_id):
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = Answer.of(by_id[output.request_id], output)
                    texts.pop(output.request_id, None)
                else:
                    texts[output.request_id] = output.outputs[0].text
            now = time.perf_counter()
            last = len(answers) == len(by_id)
            if not last and not watcher.due(now):
                continue
            # The text of the oldest request, which has the longest reasoning to show.
            reasoning = next(iter(texts.values()), reasoning)
            watcher.show(
                Snapshot(
                    name=side.name,
                    stats=engine.stats(),
                    seconds=now - started,
                    total=len(problems),
                    finished=len(answers),
                    right=sum(a.right for a in answers.values()),
                    owners=tuple(
                        Owner(r.request_id, len(r.block_ids), r.status is RequestStatus.COMPRESSING)
                        for r in scheduler.running
                    ),
                    reasoning=reasoning,
                )
            )
        wall = time.perf_counter() - started
        kv_bytes = pool_bytes(engine.core.runner.cache.spec)
        ordered = tuple(answers[request_id] for request_id in by_id)
        return SideResult(side.name, wall, kv_bytes, engine.stats(), ordered)


def same_answers(one: SideResult, other: SideResult) -> int:
    """Number of problems to which both gave the same answer."""
    return sum(
        a.given is not None and a.given == b.given
        for a, b in zip(one.answers, other.answers, strict=True)
    )
