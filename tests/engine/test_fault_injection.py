"""Faults at random times at every internal seam: nobody hangs, nothing leaks, everybody is told,
and whoever is not touched gets the same text as ever."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.faults import (
    CALLER_SEAMS,
    SEAMS,
    InjectedFault,
    Injector,
    random_injector,
)
from tests.engine.small_model import make_small_llm, small_options
from zipage import LLM, AsyncLLM, EngineDeadError, SamplingParams
from zipage.compression.job import CompressionJob
from zipage.engine.engine import LLMEngine
from zipage.engine.request import RequestStatus
from zipage.engine.scheduler import Scheduler
from zipage.outputs import RequestOutput

RUNS = int(os.environ.get("ZIPAGE_FAULT_RUNS", "500"))
GROUPS = 10
WATCHDOG_SECONDS = 30.0
LONGEST = 60

#: Text (encoded by the engine) and token ids; the last two share a prefix of two blocks.
PROMPTS: list[Any] = [
    "Anna has 5.",
    [7, 8, 9],
    [10 + i for i in range(40)],
    [20 + i * 7 % 280 for i in range(75)],
    [20 + i * 7 % 280 for i in range(52)],
]

#: What became of a request: its last output, or what was raised to its caller.
Outcome = RequestOutput | BaseException


class Ask(NamedTuple):
    """One request: which prompt, how long, sampled with a seed or greedy, with full KV or not."""

    prompt: int
    length: int
    seeded: bool = False
    extras: bool = False
    full: bool = False

    def params(self, length: int | None = None) -> SamplingParams:
        options: dict[str, Any] = {"temperature": 0.0}
        if self.seeded:
            options = {"temperature": 1.5, "seed": self.prompt, "top_p": 0.95}
        if self.full:
            options["compression"] = "off"
        if self.extras:
            options |= {"stop": ["never to be seen"], "logprobs": 1, "prompt_logprobs": 1}
        return SamplingParams(max_tokens=length or self.length, ignore_eos=True, **options)


class Solo:
    """Tokens and text of requests that run alone, with nothing going wrong."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = None
        self._tokens: dict[Ask, list[int]] = {}
        with make_small_llm(path, enable_prefix_caching=False) as llm:
            self.tokenizer = llm.get_tokenizer()
            for prompt, seeded, full in itertools.product(
                range(len(PROMPTS)), (False, True), (False, True)
            ):
                ask = Ask(prompt, LONGEST, seeded, full=full)
                (output,) = llm.generate([PROMPTS[prompt]], ask.params())
                self._tokens[ask] = output.outputs[0].token_ids

    def tokens(self, ask: Ask) -> list[int]:
        longest = ask._replace(length=LONGEST, extras=False)
        return self._tokens[longest][: ask.length]


@pytest.fixture(scope="module")
def solo(small_model: Path) -> Solo:
    return Solo(small_model)


class Run:
    """One run: some requests, some faults, one way of using the engine."""

    def __init__(self, seed: int, path: Path, solo: Solo) -> None:
        rng = self.rng = random.Random(seed)
        self.seed, self.solo = seed, solo
        self.driver, caller_seams = rng.choice(
            [
                (_drive_engine, ()),
                (_drive_engine, ()),
                (_drive_generate, ("on_step callback",)),
                (_drive_stream, ("stream consumer",)),
                (_drive_async, ("async consumer",)),
            ]
        )
        self.asks = {
            str(i): Ask(
                rng.randrange(len(PROMPTS)),
                rng.choice((1, 12, 40, LONGEST)),
                seeded=rng.random() < 0.4,
                extras=rng.random() < 0.4,
                full=rng.random() < 0.4,
            )
            for i in range(rng.randint(3, 8))
        }
        self.options = small_options(
            path,
            num_kv_blocks=rng.choice((9, 9, 10, 11, 40)),
            max_num_seqs=rng.choice((3, 8)),
            max_num_batched_tokens=rng.choice((16, 64, 256)),
            num_query_slots=rng.choice((1, 2, 8)),
            admission=rng.choice(("optimistic", "optimistic", "bounded")),
            async_compression=rng.random() < 0.5,
            async_scheduling=rng.random() < 0.5,
            enable_prefix_caching=rng.random() < 0.7,
        )
        self.injector: Injector = random_injector(seed, rng, caller_seams)
        self.outcomes: dict[str, Outcome] = {}
        self.dead = False

    def __call__(self) -> None:
        before = threading.active_count()
        self.driver(self)
        gc.collect(0)
        assert threading.active_count() == before, "a thread is left over"
        self._check()

    def settle(self, engine: LLMEngine) -> None:
        """The requests have ended: what they held must come back, or the engine be dead."""
        try:
            for _ in range(1000):
                if not engine.has_unfinished:
                    break
                engine.step()
        except EngineDeadError:
            self.dead = True
            return
        self.check_empty(engine)

    def check_empty(self, engine: LLMEngine) -> None:
        """Nothing is owned, leased or swapped any more."""
        core = engine.core
        core.check_integrity()
        pool = core.scheduler.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks, "blocks leak"
        assert core.scheduler.num_query_slots_in_use == 0, "query slots leak"
        assert len(core.runner.swap) == 0, "host memory leaks"
        assert not engine.has_unfinished and not engine.live_requests

    def _check(self) -> None:
        assert self.outcomes.keys() == self.asks.keys(), "somebody was not told"
        fatal = {seam.name for seam in SEAMS if not seam.contained}
        if self.dead:
            assert fatal & self.injector.hit, f"{self.injector.hit} stopped the engine"
        for name, ask in self.asks.items():
            outcome, expected = self.outcomes[name], self.solo.tokens(ask)
            if isinstance(outcome, BaseException):
                assert "injected at" in _causes(outcome), outcome
                continue
            assert outcome.finished
            (answer,) = outcome.outputs
            assert answer.token_ids == expected[: len(answer.token_ids)], "other tokens than alone"
            if answer.finish_reason == "length":
                assert answer.token_ids == expected and outcome.error is None
                if ask.extras:
                    assert outcome.prompt_logprobs is not None
                    assert len(outcome.prompt_logprobs) == len(outcome.prompt_token_ids)
                assert answer.text == self.solo.tokenizer.decode(
                    expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            elif answer.finish_reason == "error":
                assert outcome.error is not None and "injected at" in outcome.error, outcome.error
            else:
                assert answer.finish_reason == "abort"


def _causes(error: BaseException | None) -> str:
    words = ""
    while error is not None:
        words += f"{error!r}; "
        error = error.__cause__ or error.__context__
    return words


def _drive_engine(run: Run) -> None:
    """Submissions and aborts between steps, through `LLMEngine`."""
    with LLM(**run.options) as llm:
        engine = llm.engine
        engine.inputs._tokenizer = run.solo.tokenizer
        _add_shortages(run.rng, engine.core.scheduler)
        todo = dict(run.asks)
        with run.injector.installed(engine):
            while todo or engine.has_unfinished:
                while todo and (run.rng.random() < 0.4 or not engine.has_unfinished):
                    name = next(iter(todo))
                    ask = todo.pop(name)
                    try:
                        engine.add_request(
                            PROMPTS[ask.prompt],
                            ask.params(),
                            name,
                            priority=run.rng.choice((0, 0, 1)),
                            stream=run.rng.random() < 0.5,
                        )
                    except Exception as error:
                        run.outcomes[name] = error
                try:
                    if run.rng.random() < 0.03 and engine.live_requests:
                        name = run.rng.choice(sorted(engine.live_requests))
                        last = engine.abort(name)
                        assert last is not None
                        run.outcomes[name] = last
                    for output in engine.step():
                        if output.finished:
                            run.outcomes[output.request_id] = output
                    engine.core.check_integrity()
                except EngineDeadError as error:
                    run.dead = True
                    for name in engine.live_requests:
                        run.outcomes.setdefault(name, error)
                    for output in engine.fail_all(error.__cause__ or error):
                        run.outcomes[output.request_id] = output
                    run.outcomes.update(dict.fromkeys(todo, error))
                    break
        if not run.dead:
            run.settle(engine)


def _add_shortages(rng: random.Random, scheduler: Scheduler) -> None:
    """In some steps, swap a request out as if an older one needed its blocks."""
    plan = scheduler.plan_compressions

    def plan_compressions() -> list[CompressionJob]:
        compressed = [
            r for r in scheduler.running if r.compressed and r.status is RequestStatus.RUNNING
        ]
        if compressed and rng.random() < 0.15:
            scheduler._preempt(rng.choice(compressed))
        return plan()

    scheduler.plan_compressions = plan_compressions  # type: ignore[method-assign]


def _drive_generate(run: Run) -> None:
    """One call of `LLM.generate`."""
    with LLM(**run.options) as llm:
        llm.engine.inputs._tokenizer = run.solo.tokenizer
        asks = list(run.asks.values())
        with run.injector.installed(llm.engine):
            try:
                outputs = llm.generate(
                    [PROMPTS[ask.prompt] for ask in asks],
                    [ask.params() for ask in asks],
                    on_step=lambda stats: run.injector.at("on_step callback"),
                )
            except Exception as error:
                run.dead = isinstance(error, EngineDeadError)
                run.outcomes = dict.fromkeys(run.asks, error)
            else:
                run.outcomes = dict(zip(run.asks, outputs, strict=True))
        if not run.dead:
            run.settle(llm.engine)


def _drive_stream(run: Run) -> None:
    """Two streams read in turn by consumers that may fail."""
    with LLM(**run.options) as llm:
        llm.engine.inputs._tokenizer = run.solo.tokenizer
        names = list(run.asks)
        half = len(names) // 2
        with run.injector.installed(llm.engine):
            streams: list[tuple[Any, dict[str, str], list[str]]] = []
            for part in (names[:half], names[half:]):
                asks = [run.asks[name] for name in part]
                try:
                    stream = llm.stream(
                        [PROMPTS[a.prompt] for a in asks], [a.params() for a in asks]
                    )
                except Exception as error:
                    run.outcomes.update(dict.fromkeys(part, error))
                else:
                    name_of = dict(zip(stream.request_ids, part, strict=True))
                    streams.append((stream, name_of, part))
            while streams:
                stream, name_of, part = run.rng.choice(streams)
                try:
                    output = next(stream)
                    run.injector.at("stream consumer")
                except StopIteration:
                    streams.remove((stream, name_of, part))
                except Exception as error:
                    run.dead |= isinstance(error, EngineDeadError)
                    if isinstance(error, InjectedFault):
                        stream.close()
                    for name in part:
                        run.outcomes.setdefault(name, error)
                    streams.remove((stream, name_of, part))
                else:
                    if output.finished:
                        run.outcomes[name_of[output.request_id]] = output
        if not run.dead:
            run.settle(llm.engine)


def _drive_async(run: Run) -> None:
    """Tasks on an event loop, some of which abort, leave or fail."""

    async def ask_one(llm: AsyncLLM, name: str, ask: Ask) -> RequestOutput | None:
        last, seen, leave = None, 0, run.rng.random() < 0.15
        async for last in llm.generate(PROMPTS[ask.prompt], ask.params(), name):
            run.injector.at("async consumer")
            seen += 1
            if leave and seen == 3 and not last.finished:
                await llm.abort(name)
        return last

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [ask_one(llm, name, ask) for name, ask in run.asks.items()]
        for name, result in zip(
            run.asks, await asyncio.gather(*tasks, return_exceptions=True), strict=True
        ):
            assert result is not None, f"{name} got no output"
            run.outcomes[name] = result

    llm = AsyncLLM(**run.options)
    llm.engine.inputs._tokenizer = run.solo.tokenizer
    with run.injector.installed(llm.engine):
        asyncio.run(scenario(llm))
        llm.shutdown()
    run.dead = llm._loop.error is not None
    if not run.dead:
        run.check_empty(llm.engine)


def _within_limit(work: Callable[[], None]) -> None:
    """Run `work`; if it takes too long, say where every thread is and fail."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(WATCHDOG_SECONDS)
    if thread.is_alive():
        faulthandler.dump_traceback()
        pytest.fail(f"a run hangs for {WATCHDOG_SECONDS} s")
    if raised:
        raise raised[0]


_hit: set[str] = set()
_runs_done = 0


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_faults(group: int, small_model: Path, solo: Solo) -> None:
    global _runs_done
    for seed in range(group, RUNS, GROUPS):
        run = Run(seed, small_model, solo)
        try:
            _within_limit(run)
        except BaseException:
            print(
                f"seed {seed}: {run.driver.__name__}, faults {run.injector.plan}, "
                f"hit {run.injector.hit}, {run.asks}, {run.options}"
            )
            raise
        _hit.update(run.injector.hit)
        _runs_done += 1


def test_every_seam_was_hit() -> None:
    """Without this, a seam that is never passed would look like one that copes."""
    if _runs_done < min(RUNS, 500):
        pytest.skip("needs all runs of this module in this process")
    assert _hit == {seam.name for seam in SEAMS} | set(CALLER_SEAMS)
