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
            if job.request_id == victim and job.compression_index == 1:
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
        inner, calls = runner.execute, 0

        def execute(plan):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == 5:
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
        answer = llm.engine._groups["a"].requests[0].payload

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
