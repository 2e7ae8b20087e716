"""`EngineProcessClient`: answers as in one process, streams, cancels, limits, statistics."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import faulty_worker
from tests.engine.small_model import make_small_llm, save_small_model, small_options
from tests.engine.workload import greedy, tokens_of
from zipage import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    EngineProcessClient,
    RequestError,
    RequestOutput,
    RequestTimeoutError,
    SamplingParams,
)
from zipage.engine import engine_process
from zipage.engine.client import EngineClient
from zipage.engine.messages import Abort, ToEngine
from zipage.engine.stats import EngineStats

PROMPT = [5, 258, 259, 270, 271, 9, 40]
LONG = 100_000


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG + 1000)


@pytest.fixture(scope="module")
def options(long_model: Path) -> dict[str, Any]:
    return small_options(long_model, num_kv_blocks=LONG // 16, max_num_seqs=64)


@pytest.fixture(scope="module")
def solo(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**{**options, "num_kv_blocks": 200}) as llm:
        yield llm


class Steps:
    """What `on_step` was told, and what the engine process wrote down about its steps."""

    def __init__(self, log: Path) -> None:
        self.seen: list[EngineStats] = []
        self.log = log

    def __call__(self, stats: EngineStats) -> None:
        self.seen.append(stats)

    def with_request(self, name: str) -> tuple[int, int]:
        """Steps begun with the request, and those of them after the engine was told to end it."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        begun = [line[0] == "step" and name in line for line in lines]
        aborts = [line[0] == "abort" and f"{name}#" in " ".join(line) for line in lines]
        told = max((index for index, is_it in enumerate(aborts) if is_it), default=len(lines))
        return sum(begun), sum(begun[told:])

    async def are_begun(self, name: str) -> None:
        """Wait for steps with the request."""
        while self.with_request(name)[0] <= 2:
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(tmp_path_factory.mktemp("steps") / "log")


@pytest.fixture(scope="module")
def client(options: dict[str, Any], steps: Steps) -> Iterator[EngineProcessClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faulty_worker.STEP_LOG, str(steps.log))
        patch.setattr(engine_process, "_PROGRAM", faulty_worker.PROGRAM)
        client = EngineProcessClient(on_step=steps, **options)
    yield client
    assert client.is_running
    client.shutdown()


def run(work: Awaitable[Any], seconds: float = 20.0) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


async def last_of(
    client: EngineClient, prompt: Any, params: SamplingParams, name: str | None = None, **more: Any
) -> RequestOutput:
    last = None
    async for output in client.generate(prompt, params, name, **more):
        last = output
    assert last is not None
    return last


async def idle(client: EngineClient) -> EngineStats:
    """Wait until nothing runs; everything must be back then."""
    await asyncio.sleep(0.15)  # what was last told may be older than the last request
    for _ in range(200):
        stats = client.stats()
        if not stats.running and not stats.waiting and not stats.blocks_owned:
            break
        await asyncio.sleep(0.02)
    assert (stats.running, stats.waiting, stats.compressing) == (0, 0, 0)
    assert (stats.blocks_owned, stats.query_slots_in_use) == (0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    return stats


def answer(output: RequestOutput) -> dict[str, Any]:
    """All of an output but times and its name."""
    completions = [
        (
            part.index,
            part.text,
            part.token_ids,
            part.cumulative_logprob,
            part.logprobs,
            part.finish_reason,
            part.stop_reason,
            None
            if part.kv_stats is None
            else [
                (k.num_tokens, k.length, k.kept, k.lists, k.keepers, k.layer_positions)
                for k in part.kv_stats
            ],
            (part.metrics.compressions, part.metrics.evicted_tokens),
        )
        for part in output.outputs
    ]
    told = ("prompt", "prompt_token_ids", "finished", "usage", "error", "prompt_logprobs")
    return {"completions": completions, **{name: getattr(output, name) for name in told}}


ASKS: list[tuple[Any, SamplingParams]] = [
    (PROMPT, greedy(60)),
    ("Anna gives Bob 7.", greedy(40)),
    ({"prompt": "#1 Anna", "prompt_token_ids": PROMPT}, greedy(20)),
    (PROMPT, SamplingParams(n=3, seed=7, temperature=1.2, max_tokens=50, ignore_eos=True)),
    (PROMPT, greedy(90, return_kv_stats=True)),
    (PROMPT, greedy(20, logprobs=3)),
    (PROMPT * 9, greedy(5, prompt_logprobs=2, logprobs=0)),
    (PROMPT, greedy(20, detokenize=False)),
    (PROMPT, greedy(30, repetition_penalty=1.5, logit_bias={8: 3.0}, min_tokens=4)),
    (PROMPT, greedy(60, compression="off")),
]


def test_answers_are_those_of_one_process(client: EngineProcessClient, solo: LLM) -> None:
    asks = list(ASKS)
    text = solo.generate(PROMPT, greedy(60))[0].outputs[0].text
    for at in (3, len(text) // 2):
        for include in (False, True):
            stop = [text[at : at + 3], "never comes"]
            asks.append((PROMPT, greedy(60, stop=stop, include_stop_str_in_output=include)))
    token = solo.generate(PROMPT, greedy(60))[0].outputs[0].token_ids[10]
    asks.append((PROMPT, greedy(60, stop_token_ids=[token])))
    expected = [answer(solo.generate(prompt, params)[0]) for prompt, params in asks]
    stopped = [e["completions"][0][5] for e in expected].count("stop")
    assert stopped == 5 and any(e["completions"][0][7] for e in expected)

    async def ask() -> list[RequestOutput]:
        todo = (last_of(client, prompt, params) for prompt, params in asks)
        outputs = await asyncio.gather(*todo)
        await idle(client)
        return outputs

    for output, right in zip(run(ask()), expected, strict=True):
        assert answer(output) == right


def test_outputs_grow(client: EngineProcessClient) -> None:
    async def read() -> None:
        before = ("", [])
        async for output in client.generate(PROMPT, greedy(60)):
            text, tokens = output.outputs[0].text, output.outputs[0].token_ids
            assert text.startswith(before[0]) and tokens[: len(before[1])] == before[1]
            assert len(tokens) > len(before[1])
            assert output.metrics.time_to_first_token is not None
            before = (text, tokens)
        assert len(before[1]) == 60

    run(read())


def test_only_the_last_output(client: EngineProcessClient, options: dict[str, Any]) -> None:
    async def outputs(engine: EngineClient, params: Any, final_only: bool) -> list[RequestOutput]:
        stream = engine.generate(PROMPT, params, final_only=final_only)
        return [output async for output in stream]

    def answers(output: RequestOutput) -> list[Any]:
        names = ("text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob")
        return [[getattr(one, name) for name in names] for one in output.outputs]

    thread = AsyncLLM(**{**options, "num_kv_blocks": 200})
    for stop in (None, "7"):
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, n=2, stop=stop, logprobs=2)
        *earlier, last = run(outputs(client, params, False))
        assert len(earlier) > 5
        for engine in (client, thread):
            (only,) = run(outputs(engine, params, True))
            assert only.finished and answers(only) == answers(last)
            assert only.metrics.time_to_first_token
    thread.shutdown()


def test_stop_string_ends_the_request_in_the_engine(
    client: EngineProcessClient, solo: LLM, steps: Steps
) -> None:
    text = solo.generate(PROMPT, greedy(60))[0].outputs[0].text
    params = greedy(900, stop=[text[20:24]])

    async def ask() -> None:
        output = await last_of(client, PROMPT, params, "slow-stop")
        assert output.outputs[0].finish_reason == "stop"
        await idle(client)

    run(ask())
    begun, after = steps.with_request("slow-stop")
    assert begun < 900 and after <= 2


def test_closed_and_cancelled_iterations_give_back_within_two_steps(
    client: EngineProcessClient, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tells the engine at once, and the engine ends them as soon as it is told."""
    told: list[str] = []
    send = client._front._process.send

    def noted(message: ToEngine) -> None:
        if isinstance(message, Abort):
            told.extend(name.partition("#")[0] for name in message.sequence_ids)
        send(message)

    monkeypatch.setattr(client._front._process, "send", noted)

    async def scenario() -> None:
        other = asyncio.create_task(last_of(client, PROMPT, greedy(120), "slow-other"))
        stream = client.generate(PROMPT, greedy(LONG), "slow-closed")
        async for output in stream:
            if output.usage.completion_tokens > 20:
                break
        await stream.aclose()
        assert told == ["slow-closed"]
        task = asyncio.create_task(last_of(client, PROMPT, greedy(LONG), "slow-cancelled"))
        await steps.are_begun("slow-cancelled")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert told == ["slow-closed", "slow-cancelled"]
        task = asyncio.create_task(last_of(client, PROMPT, greedy(LONG), "slow-aborted"))
        await steps.are_begun("slow-aborted")
        await client.abort("slow-aborted")
        assert told == ["slow-closed", "slow-cancelled", "slow-aborted"]
        assert (await task).outputs[0].finish_reason == "abort"
        assert len(tokens_of(await other)) == 120
        await idle(client)

    run(scenario())
    assert all(steps.with_request(name)[1] <= 2 for name in told)


def test_many_streams_with_random_cancels(client: EngineProcessClient, solo: LLM) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(3, 90))] for _ in range(8)]
    expected = [tokens_of(solo.generate(prompt, greedy(120))[0]) for prompt in prompts]

    async def one(which: int, leave: float | None) -> bool:
        work = last_of(client, prompts[which], greedy(120))
        try:
            output = await asyncio.wait_for(work, leave)
        except asyncio.TimeoutError:
            return False
        assert tokens_of(output) == expected[which]
        return True

    async def scenario() -> list[bool]:
        leaves = [rng.choice((None, rng.random())) for _ in range(64)]
        results = await asyncio.gather(*(one(i % 8, leave) for i, leave in enumerate(leaves)))
        await idle(client)
        return results

    results = run(scenario())
    assert 20 < sum(results) < 64


def test_a_slow_reader_holds_nobody_up(client: EngineProcessClient, solo: LLM) -> None:
    expected = tokens_of(solo.generate(PROMPT, greedy(200))[0])

    async def scenario() -> None:
        slow = client.generate(PROMPT, greedy(200))
        await anext(slow)
        (stream,) = client._live
        others = await asyncio.gather(*(last_of(client, PROMPT, greedy(200)) for _ in range(3)))
        assert all(tokens_of(other) == expected for other in others)
        await idle(client)
        assert len(stream._outputs) == 1  # the rest, in one piece
        rest = [output async for output in slow]
        assert len(rest) == 1 and tokens_of(rest[0]) == expected

    run(scenario())


def test_unread_outputs_of_the_engine_on_a_thread_do_not_pile_up(small_model: Path) -> None:
    llm = AsyncLLM(**small_options(small_model))

    async def scenario() -> None:
        slow = llm.generate(PROMPT, greedy(300))
        await anext(slow)
        (stream,) = llm._live
        assert len(tokens_of(await last_of(llm, PROMPT, greedy(300)))) == 300
        await idle(llm)
        assert len(stream._outputs) == 64
        assert len(tokens_of([output async for output in slow][-1])) == 300

    try:
        run(scenario())
    finally:
        llm.shutdown()


def test_a_prompt_of_100k_tokens_holds_nobody_up(client: EngineProcessClient, solo: LLM) -> None:
    """Neither as ids, nor as text that is tokenised on a thread."""
    expected = tokens_of(solo.generate(PROMPT, greedy(40))[0])

    async def scenario() -> None:
        small = client.generate(PROMPT, greedy(40))
        output = await anext(small)
        big = asyncio.create_task(last_of(client, [7] * LONG, greedy(5)))
        async for output in small:  # noqa: B007
            pass
        assert tokens_of(output) == expected
        while client.stats().running:
            if client.stats().blocks_owned > 10:
                break
            await asyncio.sleep(0.01)
        assert not big.done()
        big.cancel()
        text = asyncio.create_task(last_of(client, "Anna gives Bob. " * 40_000, greedy(5)))
        await asyncio.sleep(0)
        assert tokens_of(await last_of(client, PROMPT, greedy(40))) == expected
        with pytest.raises(RequestError, match="max_model_len"):
            await text
        await idle(client)

    run(scenario())


def test_refused_requests(client: EngineProcessClient) -> None:
    async def refused(prompt: Any, match: str, **more: Any) -> None:
        params = more.pop("params", greedy(5))
        with pytest.raises(RequestError, match=match):
            await last_of(client, prompt, params, **more)

    async def scenario() -> None:
        before = client.stats()
        await refused([], "empty")
        await refused([10**6], "vocabulary")
        await refused(PROMPT, "cache_salt", cache_salt="\ud800")
        await refused(PROMPT, "request_id", name="\ud800")
        await refused(PROMPT, "kv_budget", params=greedy(5, kv_budget=17))
        # Only the engine knows that the pool is too small.
        await refused([7] * LONG, "blocks", params=greedy(900, compression="off"), name="large")
        twice = client.generate(PROMPT, greedy(900), "twice")
        await anext(twice)
        await refused(PROMPT, "already in use", name="twice")
        await twice.aclose()
        assert len(tokens_of(await last_of(client, PROMPT, greedy(5), "twice"))) == 5
        stats = await idle(client)
        assert stats.requests_refused - before.requests_refused == 7
        assert stats.requests_submitted - before.requests_submitted == 2

    run(scenario())


def test_a_failing_detokenizer_ends_its_request_only(
    client: EngineProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipage.engine.detokenizer import IncrementalDetokenizer

    push = IncrementalDetokenizer.push

    def fail(self: IncrementalDetokenizer, token_ids: list[int]) -> str:
        if self._min_tokens == 3 and self.num_tokens >= 10:
            raise ValueError("bad bytes")
        return push(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push", fail)

    async def scenario() -> None:
        bad, good = await asyncio.gather(
            last_of(client, PROMPT, greedy(60, min_tokens=3)), last_of(client, PROMPT, greedy(60))
        )
        assert bad.error == "detokeniser failed: ValueError: bad bytes"
        assert len(tokens_of(good)) == 60
        await idle(client)

    run(scenario())


def test_timeout_aborts_the_request(client: EngineProcessClient) -> None:
    async def scenario() -> None:
        with pytest.raises(RequestTimeoutError, match=r"0\.2 s"):
            await last_of(client, PROMPT, greedy(900), "slow-timeout", timeout=0.2)
        # Also one that nobody reads.
        unread = client.generate(PROMPT, greedy(900), "slow-unread", timeout=0.3)
        await anext(unread)
        await asyncio.sleep(0.35)
        await idle(client)
        with pytest.raises(RequestTimeoutError):
            await anext(unread)
        assert len(tokens_of(await last_of(client, PROMPT, greedy(5), timeout=30))) == 5
        for timeout in (0, -1.0, float("nan"), "soon"):
            with pytest.raises(RequestError, match="timeout="):
                await last_of(client, PROMPT, greedy(5), timeout=timeout)

    run(scenario())


def test_the_queue_is_bounded(
    client: EngineProcessClient, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: EngineClient, running: int, queued: int, length: int) -> None:
        # A burst waits for its turn in the first steps: only what waits after them is refused.
        limit, engine._max_queued = engine._max_queued, None
        prompts = [[i + 3] * length for i in range(running + queued)]
        streams = [engine.generate(prompt, greedy(300)) for prompt in prompts]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        while engine.stats().running < running or engine._num_queued != queued:
            await asyncio.sleep(0.01)
        engine._max_queued = limit
        with pytest.raises(EngineOverloadedError, match=f"max_queued_requests={queued}"):
            await last_of(engine, PROMPT, greedy(5))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await idle(engine)
        assert len(tokens_of(await last_of(engine, PROMPT, greedy(5)))) == 5

    monkeypatch.setattr(client, "_max_queued", 2)
    run(scenario(client, 64, 2, 5))
    # Where blocks are short instead of places: one request fits the pool.
    llm = AsyncLLM(
        max_queued_requests=1,
        **small_options(small_model, num_kv_blocks=70, kv_budget=None),
    )
    try:
        run(scenario(llm, 1, 1, 600))
    finally:
        llm.shutdown()
    with pytest.raises(ConfigError, match="max_queued_requests=0"):
        AsyncLLM(max_queued_requests=0, **small_options(small_model))


def test_statistics(client: EngineProcessClient, steps: Steps) -> None:
    async def scenario() -> None:
        await idle(client)
        await asyncio.sleep(0.2)
        before, first = client.stats(), len(steps.seen)
        params = [greedy(90), greedy(40, n=2), greedy(900, stop=["e"])]
        await asyncio.gather(*(last_of(client, PROMPT, one) for one in params))
        await last_of(client, PROMPT, greedy(10))
        after = await idle(client)
        await asyncio.sleep(0.2)
        new = [stats.last_step for stats in steps.seen[first:]]
        assert [s.index for s in new] == list(range(new[0].index, new[0].index + len(new)))
        assert after.steps - before.steps <= len(new)
        generated = after.generated_tokens - before.generated_tokens
        assert (
            sum(len(s.first_token_seconds) + len(s.inter_token_seconds) for s in new) == generated
        )
        compressed = after.compressions - before.compressions
        assert sum(len(s.compression_seconds) for s in new) == compressed > 0
        finished = [f for s in new for f in s.finished]
        assert sorted(f.finish_reason for f in finished) == ["length"] * 4 + ["stop"]
        assert after.completions_stop - before.completions_stop == 1
        assert all(stats.blocks_total == after.blocks_total for stats in steps.seen[first:])
        assert max(stats.running for stats in steps.seen[first:]) > 0

    run(scenario())


def test_signals_for_the_parent_do_not_end_the_engine(client: EngineProcessClient) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(last_of(client, PROMPT, greedy(80), "slow-signal"))
        for number in (signal.SIGINT, signal.SIGTERM):
            await asyncio.sleep(0.1)
            os.kill(client.engine_pid, number)
        assert len(tokens_of(await task)) == 80
        await client.check_health()

    run(scenario())


def test_drain(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For both kinds of engine: nobody new, the quick ones finish, the slow ones are aborted."""
    monkeypatch.setattr(engine_process, "_PROGRAM", faulty_worker.PROGRAM)

    async def scenario(engine: EngineClient) -> None:
        quick = asyncio.create_task(last_of(engine, PROMPT, greedy(50)))
        endless = asyncio.create_task(last_of(engine, PROMPT, greedy(50_000), "slow-endless"))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        draining = asyncio.create_task(engine.drain(timeout=1.5))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await last_of(engine, PROMPT, greedy(5))
        assert len(tokens_of(await quick)) == 50
        assert (await endless).outputs[0].finish_reason == "abort"
        assert time.monotonic() - started > 1.4
        await draining
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    process = EngineProcessClient(**options)
    run(scenario(process))
    with pytest.raises(ProcessLookupError):
        os.kill(process.engine_pid, 0)
    run(scenario(AsyncLLM(**options)))


def test_both_are_engine_clients(client: EngineProcessClient, small_model: Path) -> None:
    llm = AsyncLLM(**small_options(small_model))
    assert isinstance(llm, EngineClient) and isinstance(client, EngineClient)
    assert llm.vocab_size == client.vocab_size == 320
    assert llm.default_sampling == client.default_sampling
    assert (llm.max_model_len, client.max_model_len) == (1024, LONG + 1000)
    run(llm.check_health())
    llm.shutdown()
    with make_small_llm(small_model) as offline:
        assert client.get_tokenizer().get_vocab() == offline.get_tokenizer().get_vocab()


def test_a_request_that_cannot_be_sent_leaves_nothing(
    client: EngineProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = client._front

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(front._process, "send", None)
            with pytest.raises(TypeError):
                await anext(client.generate(PROMPT, greedy(5), "again"))
        assert not front._streams and not front._unanswered
        assert tokens_of([o async for o in client.generate(PROMPT, greedy(5), "again")][-1])

    asyncio.run(scenario())
