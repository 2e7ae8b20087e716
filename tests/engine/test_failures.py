"""Invariant 7: a failure ends the requests it touches, with its cause, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, run_alone, tokens_of
from zipage import AsyncLLM, EngineDeadError, SamplingParams


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_compression_fails_its_request_only(asynchronous: bool) -> None:
    with make_llm(async_compression=asynchronous) as llm:
        prompts = [prompt_ids(llm, 2 + i, seed=i) for i in range(4)]
        params = [greedy(90)] * 4
        runner = llm.engine.core.runner
        inner = runner.compress

        def compress(job) -> None:  # type: ignore[no-untyped-def]
            if job.request_id.startswith(f"{victim}#") and job.compression_index == 1:
                raise MemoryError("no workspace")
            inner(job)

        victim = "request-2"
        runner.compress = compress  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params)
        assert_empty(llm)
    expected = run_alone(prompts, params)
    for i, output in enumerate(outputs):
        if output.request_id == victim:
            assert output.outputs[0].finish_reason == "error"
            assert output.error == "compression failed: MemoryError: no workspace"
        else:
            assert tokens_of(output) == expected[i]


def test_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    with make_llm(max_num_seqs=2) as llm:
        prompts = [prompt_ids(llm, 2, seed=i) for i in range(4)]
        runner = llm.engine.core.runner
        inner, calls, lost = runner.execute, 0, set()

        def execute(plan):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == 5:
                lost.update(item.request.request_id for item in plan.scheduled)
            if any(item.request.request_id in lost for item in plan.scheduled):
                raise RuntimeError("device lost a page")
            return inner(plan)

        runner.execute = execute  # type: ignore[method-assign]
        outputs = llm.generate(prompts, greedy(30))
        failed = [o for o in outputs if o.error]
        assert [o.error for o in failed] == [
            "model step failed: RuntimeError: device lost a page"
        ] * 2
        assert all(o.outputs[0].finish_reason == "error" for o in failed)
        good = [i for i, o in enumerate(outputs) if not o.error]
        assert_empty(llm)
    expected = run_alone([prompts[i] for i in good], [greedy(30)] * len(good))
    assert [tokens_of(outputs[i]) for i in good] == expected


def test_failed_detokeniser_fails_its_request_only() -> None:
    with make_llm() as llm:
        prompts = [prompt_ids(llm, 2, seed=i) for i in range(2)]
        params = [greedy(20, stop=["never"]), greedy(20)]
        llm.engine.add_request(prompts[0], params[0], "a")
        llm.engine.add_request(prompts[1], params[1], "b")
        answer = llm.engine.outputs._groups["a"].answers[0]

        def push(ids):  # type: ignore[no-untyped-def]
            raise ValueError("bad bytes")

        answer.detokenizer.push = push
        done = {}
        while llm.engine.has_unfinished:
            done.update({o.request_id: o for o in llm.engine.step()})
        assert done["a"].error == "detokeniser failed: ValueError: bad bytes"
        assert len(tokens_of(done["b"])) == 20
        assert_empty(llm)


def test_engine_failure_reaches_every_caller() -> None:
    """A failure of the scheduler itself stops the engine, and everybody is told."""

    async def scenario() -> None:
        llm = AsyncLLM(device="cpu", block_size=16, kv_budget=64, num_kv_blocks=100)

        def schedule():  # type: ignore[no-untyped-def]
            raise RuntimeError("broken books")

        llm.engine.core.scheduler.schedule = schedule  # type: ignore[method-assign]

        async def ask() -> str | None:
            error = None
            async for output in llm.generate([5, 6, 7], SamplingParams(max_tokens=5)):
                error = output.error
            return error

        errors = await asyncio.wait_for(asyncio.gather(ask(), ask(), return_exceptions=True), 30)
        assert all("broken books" in str(e) for e in errors), errors
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(ask(), 30)
        assert not llm.is_running
        llm.shutdown()

    asyncio.run(scenario())


def test_interrupted_compression_leaves_a_usable_engine() -> None:
    with make_llm() as llm:
        prompts = [prompt_ids(llm, 4 + i, seed=i) for i in range(3)]
        runner = llm.engine.core.runner
        inner, calls = runner.compress, 0

        def compress(job) -> None:  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            inner(job)

        runner.compress = compress  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy(60))
        llm.engine.step()
        assert_empty(llm)
        outputs = llm.generate(prompts, greedy(60))
    assert [tokens_of(o) for o in outputs] == run_alone(prompts, [greedy(60)] * 3)


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_failed_swap_fails_its_request_only(direction: str) -> None:
    with make_llm() as llm:
        core = llm.engine.core
        prompts = [prompt_ids(llm, 2, seed=i) for i in range(2)]
        for name, prompt in zip("ab", prompts, strict=True):
            llm.engine.add_request(prompt, greedy(60), name)
        while core.scheduler.counters.compressions < 2:
            llm.engine.step()

        def fail(move) -> None:  # type: ignore[no-untyped-def]
            raise MemoryError("host memory is full")

        setattr(core.runner, direction, fail)
        victim = next(r for r in core.scheduler.running if r.external_id == "b")
        core.scheduler._preempt(victim)
        done = {}
        while llm.engine.has_unfinished:
            done.update({o.request_id: o for o in llm.engine.step()})
        assert done["b"].error == "swap failed: MemoryError: host memory is full"
        assert tokens_of(done["a"]) == run_alone(prompts[:1], [greedy(60)])[0]
        assert_empty(llm)


def test_failed_decoding_of_a_logprob_fails_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def token_text(tokenizer, token):  # type: ignore[no-untyped-def]
        raise ValueError("no such token")

    monkeypatch.setattr("zipage.engine.output_processor.token_text", token_text)
    with make_llm() as llm:
        prompt = prompt_ids(llm, 2, seed=1)
        bad, good = llm.generate([prompt, prompt], [greedy(5, logprobs=1), greedy(5)])
        assert bad.error == "detokeniser failed: ValueError: no such token"
        assert len(tokens_of(good)) == 5
        assert_empty(llm)


def test_any_exception_in_the_compression_thread_is_told() -> None:
    """Not even SystemExit ends the thread unnoticed, which would leave its request waiting."""
    with make_llm(async_compression=True) as llm:
        runner = llm.engine.core.runner
        inner = runner.compress

        def compress(job) -> None:  # type: ignore[no-untyped-def]
            if job.request_id.startswith("request-0#"):
                raise SystemExit("a library gave up")
            inner(job)

        runner.compress = compress  # type: ignore[method-assign]
        prompt = prompt_ids(llm, 2, seed=1)
        bad, good = llm.generate([prompt, prompt], greedy(40))
        assert bad.error == "compression failed: SystemExit: a library gave up"
        assert len(tokens_of(good)) == 40 and good.metrics.compressions > 0
        assert_empty(llm)


def test_lost_compression_thread_stops_the_engine() -> None:
    with make_llm(async_compression=True) as llm:
        executor = llm.engine.core._executor
        executor._todo.put(None)
        executor._thread.join()
        with pytest.raises(EngineDeadError, match="the compression thread ended"):
            llm.generate([prompt_ids(llm, 2, seed=1)], greedy(60))


def test_failed_submission_of_a_compression_fails_its_request_only() -> None:
    with make_llm() as llm:
        executor = llm.engine.core._executor
        inner = executor.submit

        def submit(job) -> None:  # type: ignore[no-untyped-def]
            if job.request_id.startswith("request-0#"):
                raise RuntimeError("can't start new thread")
            inner(job)

        executor.submit = submit  # type: ignore[method-assign]
        prompt = prompt_ids(llm, 2, seed=1)
        bad, good = llm.generate([prompt, prompt], greedy(40))
        assert bad.error == "compression failed: RuntimeError: can't start new thread"
        assert len(tokens_of(good)) == 40
        assert_empty(llm)


def test_failed_step_callback_ends_its_call_only() -> None:
    with make_llm() as llm:
        prompts = [prompt_ids(llm, 2, seed=i) for i in range(2)]
        other = llm.stream([prompts[0]], greedy(30))
        next(other)
        steps = 0

        def on_step(stats) -> None:  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            if steps == 5:
                raise LookupError("no such gauge")

        with pytest.raises(LookupError, match="no such gauge"):
            llm.generate([prompts[1]], greedy(30), on_step=on_step)
        *_, last = other
        assert tokens_of(last) == run_alone(prompts[:1], [greedy(30)])[0]
        assert_empty(llm)


def test_failure_while_reporting_stops_the_engine_for_all() -> None:
    """Half of the step's outputs are lost then: nobody may wait for them."""
    with make_llm() as llm:
        prompt = prompt_ids(llm, 2, seed=1)
        streams = [llm.stream([prompt], greedy(30)) for _ in range(2)]
        next(streams[0])
        report = llm.engine.outputs._report

        def failing(group):  # type: ignore[no-untyped-def]
            if len(group.answers[0].token_ids) > 5:
                raise RuntimeError("no report")
            return report(group)

        llm.engine.outputs._report = failing  # type: ignore[method-assign]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="no report"):
                list(stream)


def test_failed_start_of_the_second_answer_queues_nothing(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from zipage.engine import output_processor as module

    made = 0
    start = module.IncrementalDetokenizer

    def second_fails(*args):  # type: ignore[no-untyped-def]
        nonlocal made
        made += 1
        if made == 2:
            raise ValueError("no decoder")
        return start(*args)

    monkeypatch.setattr(module, "IncrementalDetokenizer", second_fails)
    with make_llm() as llm:
        with pytest.raises(ValueError, match="no decoder"):
            llm.generate([[5, 6, 7]], greedy(5, n=3, stop=["x"]))
        assert_empty(llm)
        assert len(tokens_of(llm.generate([[5, 6, 7]], greedy(5))[0])) == 5


def test_failure_while_stopping_does_not_hang_shutdown() -> None:
    async def scenario() -> None:
        llm = AsyncLLM(device="cpu", block_size=16, kv_budget=64, num_kv_blocks=100)

        async def ask() -> None:
            async for _ in llm.generate([5, 6, 7], SamplingParams(max_tokens=4000)):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(ask())
        await asyncio.wait_for(started.wait(), 30)

        def abort(request_id):  # type: ignore[no-untyped-def]
            raise RuntimeError("no abort")

        llm.engine.abort = abort  # type: ignore[method-assign]
        await asyncio.wait_for(asyncio.to_thread(llm.shutdown), 30)
        with pytest.raises((EngineDeadError, AssertionError)):
            await asyncio.wait_for(task, 30)
            assert False, "it ended as if nothing had happened"  # noqa: B011

    asyncio.run(scenario())


def test_failure_outside_the_step_reaches_every_caller() -> None:
    async def scenario() -> None:
        llm = AsyncLLM(device="cpu", block_size=16, kv_budget=64, num_kv_blocks=100)

        def report(group):  # type: ignore[no-untyped-def]
            raise RuntimeError("no report")

        llm.engine.outputs._report = report  # type: ignore[method-assign]

        async def ask() -> None:
            async for _ in llm.generate([5, 6, 7], SamplingParams(max_tokens=5)):
                pass

        tasks = [asyncio.create_task(ask()) for _ in range(3)]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert all(isinstance(r, (EngineDeadError, RuntimeError)) for r in results), results
        llm.shutdown()

    asyncio.run(scenario())
