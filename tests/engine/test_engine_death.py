"""The engine process dies, hangs or cannot be started; its parent dies."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import faulty_worker
from tests.engine.small_model import make_small_llm, small_options
from tests.engine.workload import greedy, tokens_of
from zipage import ConfigError, EngineDeadError, EngineProcessClient, ModelError, RequestOutput
from zipage.engine import engine_process, process_client

PROMPT = [5, 258, 259, 270, 271, 9, 40]


@pytest.fixture(scope="module")
def client(small_model: Path) -> Iterator[EngineProcessClient]:
    """One whose engine may die as often as the tests like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "_PROGRAM", faulty_worker.PROGRAM)
        patch.setattr(engine_process, "_HEARTBEAT", 0.2)
        patch.setattr(process_client, "_DEATH_SECONDS", 0.0)
        client = EngineProcessClient(
            on_engine_death="restart",
            heartbeat_timeout=1.0,
            step_timeout=1.0,
            **small_options(small_model),
        )
        yield client
        client.shutdown()


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[int]:
    with make_small_llm(small_model) as llm:
        return tokens_of(llm.generate(PROMPT, greedy(80))[0])


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


async def last_of(client: EngineProcessClient, max_tokens: int, name: str | None) -> RequestOutput:
    last = None
    async for output in client.generate(PROMPT, greedy(max_tokens), name):
        last = output
    assert last is not None
    return last


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # `run` limits it
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def is_killed(pid: int) -> bool:
    """Whether it has ended, or does so at once: a signal is no function call."""
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize(
    ("how", "cause", "seconds"),
    [
        ("raise", "RuntimeError: broken books", 1.0),
        ("exit", "exit status 3", 1.0),
        ("kill", "killed by SIGKILL", 1.0),
        ("hang", "a step took longer than 1 s", 4.0),
        ("stop", "no sign of life for 1 s", 4.0),
    ],
)
def test_death_is_noticed_told_and_mended(
    client: EngineProcessClient, expected: list[int], how: str, cause: str, seconds: float
) -> None:
    async def scenario() -> None:
        assert client.is_running
        engine = client.engine_pid
        others = [asyncio.create_task(last_of(client, 900, f"slow-{i}")) for i in range(3)]
        await asyncio.sleep(0.2)
        started = time.monotonic()
        if how in ("kill", "stop"):
            os.kill(engine, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        else:
            others.append(asyncio.create_task(last_of(client, 5, how)))
        for error in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and cause in str(error)
        assert time.monotonic() - started < seconds + 1.0
        with pytest.raises(EngineDeadError, match=cause):
            await client.check_health()
        with pytest.raises(EngineDeadError, match=cause):
            await last_of(client, 5, None)
        assert not client.is_running and not is_alive(engine)
        await until(lambda: client.is_running)
        await client.check_health()
        assert client.engine_pid != engine
        # The same names may be used again.
        assert tokens_of(await last_of(client, 80, "slow-0")) == expected
        assert client.stats().completions_error >= 3

    run(scenario())


@pytest.mark.slow
def test_death_at_random_moments(client: EngineProcessClient, expected: list[int]) -> None:
    """Every request ends, well or with EngineDeadError, whatever the process was about."""
    rng = random.Random(11)

    async def one() -> bool:
        try:
            assert tokens_of(await last_of(client, 80, None)) == expected
        except EngineDeadError:
            return False
        return True

    async def scenario() -> list[bool]:
        await until(lambda: client.is_running)
        tasks = [asyncio.create_task(one()) for _ in range(16)]
        await asyncio.sleep(rng.random() * 0.2)
        killed = client.engine_pid
        os.kill(killed, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        await until(lambda: client.is_running and client.engine_pid != killed)
        assert await one()
        return results

    results = [ended for _ in range(6) for ended in run(scenario())]
    assert not all(results)


def test_shutdown_in_the_middle_of_a_restart(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process is told to stop too, instead of being waited for and killed."""
    ends: list[str] = []
    reap = engine_process.EngineProcess._reap

    def noted(self: engine_process.EngineProcess, patience: float) -> str:
        ends.append(reap(self, patience))
        return ends[-1]

    monkeypatch.setattr(engine_process.EngineProcess, "_reap", noted)
    threads = set(threading.enumerate())
    client = EngineProcessClient(on_engine_death="restart", **small_options(small_model))
    os.kill(client.engine_pid, signal.SIGKILL)
    run(until(lambda: client._front.restarting))
    client.shutdown()
    assert set(ends) == {"killed by SIGKILL", "exit status 0"}
    assert not set(threading.enumerate()) - threads


def test_no_more_requests_end_than_began(small_model: Path) -> None:
    """Also those whose engine dies before it has said that it has queued them."""
    with make_small_llm(small_model) as llm:
        llm.generate(PROMPT, greedy(5))
        expected = llm.stats()
    client = EngineProcessClient(**small_options(small_model))

    async def scenario() -> None:
        os.kill(client.engine_pid, signal.SIGSTOP)
        requests = [asyncio.create_task(last_of(client, 5, None)) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(client.engine_pid, signal.SIGKILL)
        await asyncio.gather(*requests, return_exceptions=True)

    run(scenario())
    stats = client.stats()
    client.shutdown()
    assert stats.requests_submitted == stats.completions_error == 3
    assert stats.prompt_tokens == 3 * expected.prompt_tokens


def test_death_without_restart(small_model: Path) -> None:
    threads = set(threading.enumerate())
    client = EngineProcessClient(**small_options(small_model))

    async def scenario() -> None:
        death = asyncio.create_task(client.wait_dead())
        await asyncio.sleep(0.1)
        assert not death.done()
        os.kill(client.engine_pid, signal.SIGKILL)
        assert "killed by SIGKILL" in str(await death)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.check_health()

    run(scenario())
    client.shutdown()
    client.shutdown()
    assert not set(threading.enumerate()) - threads
    with pytest.raises(EngineDeadError, match="shut down"):
        run(last_of(client, 5, None))


def test_a_death_while_starting_is_mended(
    client: EngineProcessClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine and the third die before they are ready."""
    run(until(lambda: client.is_running))
    died = tmp_path / "died"
    dying = f"import os; os.path.exists({str(died)!r}) or (open({str(died)!r}, 'w'), os._exit(7)); "
    kill = "import signal; os.path.getsize(p) or (open(p, 'w').write('2'), os.kill(os.getpid(), 9))"
    program = f"{dying}p = {str(died)!r}; {kill}; {faulty_worker.PROGRAM}"
    monkeypatch.setattr(engine_process, "_PROGRAM", program)

    async def scenario() -> None:
        killed = client.engine_pid
        os.kill(killed, signal.SIGKILL)
        await until(lambda: client.is_running and client.engine_pid != killed)
        assert len((await last_of(client, 5, None)).outputs[0].token_ids) == 5

    run(scenario())
    assert died.read_text() == "2"


def test_too_many_deaths_are_not_mended(
    client: EngineProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of engines that start are counted, too: the last test of this client."""
    run(until(lambda: client.is_running))
    front = client._front
    front._deaths.clear()
    monkeypatch.setattr(process_client, "_DEATH_SECONDS", 60.0)
    monkeypatch.setattr(engine_process, "_PROGRAM", "import os; os._exit(7)")

    async def scenario() -> None:
        os.kill(client.engine_pid, signal.SIGKILL)
        error = await client.wait_dead()
        assert "could not be restarted" in str(error) and "exit status 7" in str(error)

    run(scenario())
    assert len(front._deaths) == process_client._MAX_DEATHS
    front._on_death(front._process, EngineDeadError("again"))
    assert not front.restarting


def test_an_engine_that_never_starts_again_is_given_up(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each start takes so long that few deaths fall into a minute."""
    client = EngineProcessClient(on_engine_death="restart", **small_options(small_model))
    monkeypatch.setattr(process_client, "_DEATH_SECONDS", 0.0)
    monkeypatch.setattr(engine_process, "_PROGRAM", "import os; os._exit(7)")

    async def scenario() -> None:
        os.kill(client.engine_pid, signal.SIGKILL)
        error = await asyncio.wait_for(client.wait_dead(), 60)
        assert "could not be restarted" in str(error) and "exit status 7" in str(error)

    try:
        run(scenario())
    finally:
        client.shutdown()


def test_start_failures_are_those_of_one_process(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as in_process:
        make_small_llm(small_model, max_model_len=10**6)
    with pytest.raises(ConfigError) as in_child:
        EngineProcessClient(**small_options(small_model, max_model_len=10**6))
    assert str(in_child.value) == str(in_process.value)
    monkeypatch.setattr(engine_process, "_PROGRAM", faulty_worker.PROGRAM)
    with pytest.raises(ModelError) as in_process_model:
        make_small_llm(tmp_path)
    with pytest.raises(ModelError) as in_child_model:
        EngineProcessClient(**small_options(tmp_path))
    assert str(in_child_model.value) == str(in_process_model.value)
    for wrong in (
        {"kv_buget": 3},
        {"on_engine_death": "pray"},
        {"step_timeout": 0},
        {"start_timeout": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineProcessClient(**small_options(small_model), **wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(engine_process, "_PROGRAM", "import os; os._exit(7)")
    with pytest.raises(EngineDeadError, match="ended while starting: exit status 7"):
        EngineProcessClient(**small_options(small_model))


#: Hangs, as does a process that it has started.
HANGING = """
import os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
with open(os.environ["TEST_PIDS"], "a") as log:
    print(os.getpid(), child.pid, file=log)
os.environ.get("TEST_STOPS") and os.kill(os.getpid(), signal.SIGSTOP)
child.wait()
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """From now on engines hang while they start; gives the ids of their processes."""
    monkeypatch.setattr(engine_process, "_PROGRAM", HANGING)
    monkeypatch.setenv("TEST_PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").touch()
    return lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def test_an_engine_that_hangs_while_it_starts_is_killed(
    small_model: Path, hanging: Callable[[], list[int]]
) -> None:
    with pytest.raises(EngineDeadError, match=r"did not start within start_timeout=3 s"):
        EngineProcessClient(start_timeout=3.0, **small_options(small_model))
    assert len(hanging()) == 2 and all(map(is_killed, hanging()))


def test_a_restart_that_hangs_is_the_end(small_model: Path, request: pytest.FixtureRequest) -> None:
    client = EngineProcessClient(on_engine_death="restart", **small_options(small_model))
    hanging = request.getfixturevalue("hanging")
    client._front._timeouts = (3.0, 30.0, 300.0)

    async def scenario() -> None:
        os.kill(client.engine_pid, signal.SIGKILL)
        error = await client.wait_dead()
        assert "could not be restarted" in str(error) and "start_timeout=3 s" in str(error)

    run(scenario())
    client.shutdown()
    assert len(hanging()) == 2 and all(map(is_killed, hanging()))


def test_shutdown_does_not_wait_for_a_restart_that_hangs(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(engine_process, "_EXIT_SECONDS", 0.5)
    client = EngineProcessClient(on_engine_death="restart", **small_options(small_model))
    hanging = request.getfixturevalue("hanging")
    monkeypatch.setenv("TEST_STOPS", "1")
    os.kill(client.engine_pid, signal.SIGKILL)
    run(until(lambda: len(hanging()) == 2))
    started = time.monotonic()
    client.shutdown()
    assert time.monotonic() - started < 5
    assert all(map(is_killed, hanging()))


@pytest.mark.parametrize("forks", [False, True])
def test_the_engine_does_not_outlive_its_parent(small_model: Path, forks: bool) -> None:
    """Not even one that is killed, while a step runs; nor if a fork of its parent does."""
    code = textwrap.dedent(
        f"""
        import asyncio
        import os
        import time
        from tests.engine import faulty_worker
        from tests.engine.workload import greedy
        from zipage import EngineProcessClient
        from zipage.engine import engine_process

        async def main():
            engine_process._PROGRAM = faulty_worker.PROGRAM
            client = EngineProcessClient(**{small_options(small_model)!r})
            task = asyncio.create_task(anext(client.generate([5, 6, 7], greedy(5), "hang")))
            await asyncio.sleep(0.1)
            fork = os.fork() if {forks} else os.getpid()
            if not fork:
                time.sleep(30)
                os._exit(0)
            print(client.engine_pid, fork, flush=True)
            await task

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine, fork = map(int, parent.stdout.readline().split())
    assert is_alive(engine)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert is_alive(fork) is forks
        assert is_killed(engine)
    finally:
        if forks:
            os.kill(fork, signal.SIGKILL)


def test_a_dropped_client_ends_its_engine(small_model: Path) -> None:
    client = EngineProcessClient(**small_options(small_model))
    engine, dropped = client.engine_pid, weakref.ref(client)
    del client
    assert dropped() is None and not is_alive(engine)


def test_a_client_in_a_cycle_may_be_collected_by_its_restart(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs on any thread, and none can wait for itself."""
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: ignored.append(it.exc_value))
    client = EngineProcessClient(on_engine_death="restart", **small_options(small_model))
    front, start = client._front, client._front._start

    def collecting() -> engine_process.EngineProcess:
        gc.collect()
        return start()

    monkeypatch.setattr(front, "_start", collecting)
    client.itself = client  # type: ignore[attr-defined]
    gc.disable()
    try:
        engine = client.engine_pid
        del client
        os.kill(engine, signal.SIGKILL)
        run(until(lambda: front._closed))
    finally:
        gc.enable()
    assert front._restart is not None
    front._restart.join(20)
    assert not front._restart.is_alive() and front._process.pid == engine
    assert not ignored
