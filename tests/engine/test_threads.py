"""Threads of the caller, threads of the engine, and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small_model import make_small_llm, small_options
from tests.engine.workload import assert_empty, greedy, tokens_of
from zipage import LLM, AsyncLLM, EngineDeadError

PROMPTS = [[7 + i] * (3 + i) for i in range(6)]


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[list[int]]:
    with make_small_llm(small_model) as llm:
        return [tokens_of(o) for o in llm.generate(PROMPTS, greedy(80))]


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it never happened"
        gc.collect()
        time.sleep(0.01)


# ---------------------------------------------------------------------- several callers


def test_several_threads_may_use_one_llm(small_model: Path, expected: list[list[int]]) -> None:
    results: dict[int, list[int]] = {}
    with make_small_llm(small_model, async_compression=True) as llm:

        def work(i: int) -> None:
            if i % 2:
                results[i] = tokens_of(llm.generate([PROMPTS[i]], greedy(80))[0])
            else:
                *_, last = llm.stream([PROMPTS[i]], greedy(80))
                results[i] = tokens_of(last)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert_empty(llm)
    assert [results[i] for i in range(len(PROMPTS))] == expected


def test_one_thread_does_not_keep_the_others_out(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        busy = llm.stream([PROMPTS[0]], greedy(900))
        next(busy)
        worker = threading.Thread(target=lambda: list(busy))
        worker.start()
        llm.generate([PROMPTS[1]], greedy(2))
        assert worker.is_alive(), "the short answer did not wait for the long one"
        worker.join(60)


def test_use_from_inside_a_step_is_refused(small_model: Path) -> None:
    """As from a signal handler: it would change the books while they are being written."""
    with make_small_llm(small_model) as llm:
        schedule = llm.engine.core.scheduler.schedule
        refused = []

        def nested() -> Any:
            if not refused:
                with pytest.raises(RuntimeError, match="inside one of its own steps") as caught:
                    llm.generate([PROMPTS[0]], greedy(3))
                refused.append(caught)
            return schedule()

        llm.engine.core.scheduler.schedule = nested  # type: ignore[method-assign]
        assert len(tokens_of(llm.generate([PROMPTS[1]], greedy(5))[0])) == 5
        assert refused


def test_async_llm_serves_several_event_loops(small_model: Path, expected: list[list[int]]) -> None:
    llm = AsyncLLM(**small_options(small_model))
    owners: set[str] = set()
    schedule = llm.engine.core.scheduler.schedule

    def watched() -> Any:
        owners.add(threading.current_thread().name)
        return schedule()

    llm.engine.core.scheduler.schedule = watched  # type: ignore[method-assign]
    results: dict[int, list[int]] = {}

    async def ask(i: int) -> None:
        async for output in llm.generate(PROMPTS[i], greedy(80)):
            if output.finished:
                results[i] = tokens_of(output)

    async def both(first: int) -> None:
        await asyncio.wait_for(asyncio.gather(ask(first), ask(first + 1)), 60)

    workers = [
        threading.Thread(target=lambda i=i: asyncio.run(both(i)))  # type: ignore[misc]
        for i in (0, 2, 4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    llm.shutdown()
    assert [results[i] for i in range(len(PROMPTS))] == expected
    assert owners == {"zipage-engine"}, "only the engine's thread touches the scheduler"


# ---------------------------------------------------------------------- no thread stays


@pytest.mark.parametrize("asynchronous", [False, True])
def test_shutdown_ends_all_threads(small_model: Path, asynchronous: bool) -> None:
    before = threads()
    with make_small_llm(small_model, async_compression=asynchronous) as llm:
        llm.generate(PROMPTS, greedy(60))
        assert (threads() != before) is asynchronous
    assert threads() == before
    llm.shutdown()
    engine = AsyncLLM(**small_options(small_model, async_compression=asynchronous))
    engine.shutdown()
    engine.shutdown()
    assert threads() == before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_shutdown_gives_memory_back_at_once(
    small_model: Path, asynchronous: bool, in_the_middle: bool
) -> None:
    """Also of an engine that is still referred to, or lies in a cycle."""
    llm = make_small_llm(small_model, async_compression=asynchronous, async_scheduling=asynchronous)
    stream = llm.stream(PROMPTS, greedy(60))
    for _ in range(40) if in_the_middle else stream:
        next(stream, None)
    runner = llm.engine.core.runner
    gone = [weakref.ref(item) for item in (runner.model, runner.cache, runner.cache.kv)]
    gc.collect()
    gc.disable()
    try:
        llm.shutdown()
        llm.shutdown()
        assert [item() for item in gone] == [None] * 3
    finally:
        gc.enable()
    assert llm.stats().blocks_total > 0 == llm.stats().swapped
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, greedy(5))


def test_dropped_llm_leaves_no_thread_and_no_memory(small_model: Path) -> None:
    before = threads()
    llm = make_small_llm(small_model, async_compression=True)
    stream = llm.stream(PROMPTS, greedy(60))
    for _ in range(200):
        next(stream)
    cache = weakref.ref(llm.engine.core.runner.cache)
    del llm, stream
    wait_until(lambda: threads() == before and cache() is None)


def test_dropped_async_llm_leaves_no_thread_and_no_memory(small_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async for output in llm.generate(PROMPTS[0], greedy(60)):
            assert output.error is None

    before = threads()
    llm = AsyncLLM(**small_options(small_model, async_compression=True))
    asyncio.run(scenario(llm))
    cache = weakref.ref(llm.engine.core.runner.cache)
    del llm
    wait_until(lambda: threads() == before and cache() is None)


def test_failed_construction_leaves_no_thread(small_model: Path, tmp_path: Path) -> None:
    before = threads()
    for options in ({"num_kv_blocks": 1}, {"model": str(tmp_path)}, {"no_option": 1}):
        for kind in (LLM, AsyncLLM):
            with pytest.raises(ValueError):
                kind(**small_options(small_model, async_compression=True) | options)
    assert threads() == before


def test_dropped_stream_aborts_its_requests(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        stream = llm.stream(PROMPTS, greedy(60))
        next(stream)
        del stream
        gc.collect()
        assert_empty(llm)
        # The collector may also run in the middle of a step, where nothing can be aborted.
        stream = llm.stream([PROMPTS[0]], greedy(60))
        next(stream)
        schedule = llm.engine.core.scheduler.schedule
        live: list[int] = []

        def collecting() -> Any:
            nonlocal stream
            stream = None  # type: ignore[assignment]
            live.append(len(llm.engine.live_requests))
            return schedule()

        llm.engine.core.scheduler.schedule = collecting  # type: ignore[method-assign]
        (output,) = llm.generate([PROMPTS[1]], greedy(5))
        assert len(tokens_of(output)) == 5 and live == [2, 1, 1, 1, 1]
        assert_empty(llm)


@pytest.mark.parametrize("how", ["thread", "asyncio"])
def test_program_may_end_without_shutdown(small_model: Path, how: str) -> None:
    """In the middle of a generation, too: no hang, no crash, nothing on stderr."""
    code = textwrap.dedent(
        f"""
        import asyncio
        from zipage import LLM, AsyncLLM, SamplingParams
        options = {small_options(small_model)!r}
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        if {how!r} == "asyncio":
            llm = AsyncLLM(**options, async_compression=True)
            async def main():
                stream = llm.generate([5, 6, 7], params)
                for _ in range(100):
                    await anext(stream)
                print("answering")
            asyncio.run(main())
        else:
            llm = LLM(**options, async_compression=True)
            stream = llm.stream([[5 + i] for i in range(8)], params)
            for _ in range(500):
                next(stream)
            print("answering")
        """
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "answering"), ended.stderr
    assert ended.stderr == ""


# ---------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("asynchronous", [False, True])
def test_interrupts_come_between_steps(
    small_model: Path, expected: list[list[int]], asynchronous: bool
) -> None:
    """Wherever SIGINT arrives, KeyboardInterrupt reaches the caller and the engine stays usable."""
    rng = random.Random(5)
    with make_small_llm(small_model, async_compression=asynchronous) as llm:
        core = llm.engine.core
        seams = [
            (core.scheduler, "schedule"),
            (core.scheduler, "update"),
            (core.scheduler, "plan_compressions"),
            (core.runner, "execute"),
            (core.runner.sampler, "sample"),
            (core._executor, "submit"),
            (core._executor, "poll"),
            (core.scheduler, "finish"),
            (llm.engine.outputs, "_report"),
            (llm.engine, "add_request"),
        ]
        went_on = [False]
        for owner, name in seams:
            inner = getattr(owner, name)
            left = rng.randint(1, 6)

            def interrupted(*args: Any, inner: Callable[..., Any] = inner, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    signal.raise_signal(signal.SIGINT)
                    went_on.append(True)
                return inner(*args, **options)

            setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, greedy(80))
            assert went_on.pop(), "the step was cut short"
            delattr(owner, name)
            assert not llm.engine.live_requests, name
            while llm.engine.has_unfinished:  # compressions in flight
                llm.engine.step()
            assert_empty(llm)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert [tokens_of(o) for o in llm.generate(PROMPTS, greedy(80))] == expected


def test_second_interrupt_is_not_held_back(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:

        def hang() -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one came too late")

        llm.engine.core.scheduler.schedule = hang  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(80))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_is_left_alone(small_model: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with make_small_llm(small_model) as llm:
            on_step = lambda stats: seen or signal.raise_signal(signal.SIGINT)  # noqa: E731
            (output,) = llm.generate([PROMPTS[0]], greedy(5), on_step=on_step)
            assert len(tokens_of(output)) == 5
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
