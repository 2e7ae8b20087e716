"""What a metrics exporter reads: totals, gauges, and what happened in each step."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small_model import make_small_llm, small_options
from tests.engine.workload import greedy
from tests.observe.test_trace import MODES, TIGHT, prompts
from zipage import AsyncLLM, RequestError
from zipage.engine.stats import EngineStats, FinishedCompletion, StepStats


class Exporter:
    """Adds up the steps as a metrics exporter does."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.snapshots: list[EngineStats] = []

    def __call__(self, stats: EngineStats) -> None:
        self.steps.append(stats.last_step)
        self.snapshots.append(stats)

    def total(self, name: str) -> Any:
        return sum(getattr(step, name) for step in self.steps)

    def every(self, name: str) -> list[Any]:
        return [item for step in self.steps for item in getattr(step, name)]


@pytest.mark.parametrize(("async_compression", "async_scheduling"), MODES)
def test_steps_add_up_to_the_totals(
    small_model: Path, async_compression: bool, async_scheduling: bool
) -> None:
    options = {
        **TIGHT,
        "async_compression": async_compression,
        "async_scheduling": async_scheduling,
    }
    todo = [*prompts(7), prompts(8, length=60)[7]]
    params = [greedy(130, compression="off")] + [greedy(100 - 6 * i) for i in range(7)]
    exporter = Exporter()
    with make_small_llm(small_model, **options) as llm:
        outputs = llm.generate(todo, params, on_step=exporter)
        stats = llm.stats()
        again = llm.stats()
    assert [s.index for s in exporter.steps] == list(range(1, len(exporter.steps) + 1))
    assert exporter.total("prefill_tokens") == stats.prefill_tokens
    assert exporter.total("seconds") == pytest.approx(stats.step_seconds)
    assert len(exporter.every("compression_seconds")) == stats.compressions > 0
    assert sum(exporter.every("compression_seconds")) == pytest.approx(stats.compression_seconds)
    assert stats.compression_seconds == pytest.approx(
        sum(o.metrics.compression_time for o in outputs)
    )
    assert sum(s.num_running for s in exporter.steps) == stats.running_sum
    assert all(s.num_tokens <= TIGHT["max_num_batched_tokens"] for s in exporter.steps)
    firsts, gaps = exporter.every("first_token_seconds"), exporter.every("inter_token_seconds")
    assert len(firsts) == len(todo) and len(firsts) + len(gaps) == stats.generated_tokens
    assert min(gaps) >= 0
    expected = [o.metrics.time_to_first_token for o in outputs]
    assert sorted(firsts) == pytest.approx(sorted(expected))
    assert sum(gaps) == pytest.approx(sum(o.metrics.decode_time for o in outputs))

    finished = {f.request_id: f for f in exporter.every("finished")}
    assert len(finished) == len(exporter.every("finished")) == len(todo)
    for prompt, one, output in zip(todo, params, outputs, strict=True):
        told = finished[output.request_id]
        assert told == FinishedCompletion(
            request_id=output.request_id,
            index=0,
            finish_reason="length",
            prompt_tokens=len(prompt),
            generated_tokens=one.max_tokens or 0,
            max_tokens=one.max_tokens or 0,
            metrics=output.outputs[0].metrics,
        )
        metrics = told.metrics
        assert metrics.time_to_first_token is not None and metrics.prefill_time is not None
        waited = metrics.queue_time + metrics.prefill_time
        assert waited == pytest.approx(metrics.time_to_first_token)
        assert waited + metrics.decode_time <= metrics.e2e_time + 1e-6
        assert abs(time.time() - metrics.arrival_time - metrics.e2e_time) < 60

    assert stats.requests_submitted == stats.completions_length == len(todo)
    assert stats.completions("length") == len(todo) and stats.completions("stop") == 0
    assert stats.prompt_tokens == sum(map(len, todo))
    assert stats.preemptions == sum(o.metrics.preemptions for o in outputs)
    assert stats.preemptions_swap == sum(o.metrics.swaps for o in outputs) > 0
    assert stats.preemptions_recompute > 0
    assert stats.prefix_cache_hits == sum(o.metrics.cached_prompt_tokens for o in outputs) > 0
    assert stats.prefix_cache_queries == stats.prompt_tokens
    for snapshot in exporter.snapshots:
        blocks = snapshot.blocks_owned + snapshot.blocks_cached + snapshot.blocks_free
        assert blocks == snapshot.blocks_total == TIGHT["num_kv_blocks"]
        assert snapshot.kv_cache_usage == snapshot.blocks_owned / snapshot.blocks_total
        assert snapshot.compressing <= snapshot.running
        assert snapshot.swapped <= snapshot.waiting
        assert snapshot.query_slots_in_use <= snapshot.query_slots_total == 2
    assert max(s.swapped for s in exporter.snapshots) > 0
    assert max(s.query_slots_in_use for s in exporter.snapshots) == 2
    assert again == stats and again is not stats


def test_every_end_is_counted_by_its_reason(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        (free,) = llm.generate(prompts(1), greedy(30))
        stop = free.outputs[0].token_ids[10]
        steps: list[StepStats] = []

        def on_step(stats: EngineStats) -> None:
            steps.append(stats.last_step)

        (stopped,) = llm.generate(prompts(1), greedy(30, stop_token_ids=[stop]))
        assert stopped.outputs[0].finish_reason == "stop"
        stream = llm.stream(prompts(2), greedy(50, n=2))
        next(stream)
        stream.close()
        assert llm.stats().completions_abort == 4, "at once, though no step has run"
        for wrong in (greedy(10**5), greedy(3, kv_budget=17)):
            with pytest.raises(RequestError):
                llm.generate(prompts(1), wrong)
        llm.generate(prompts(1), greedy(2), on_step=on_step)
        told = [(f.finish_reason, f.index) for f in steps[0].finished]
        assert sorted(told) == [("abort", 0), ("abort", 0), ("abort", 1), ("abort", 1)]

        def fail(job: Any) -> None:
            raise MemoryError("no workspace")

        llm.engine.core.runner.compress = fail  # type: ignore[method-assign]
        llm.generate(prompts(1), greedy(90), on_step=on_step)
        assert [f.finish_reason for f in steps[-1].finished] == ["error"]
        stats = llm.stats()
    reasons = ("stop", "length", "abort", "error")
    assert [stats.completions(reason) for reason in reasons] == [1, 2, 4, 1]
    assert (stats.requests_submitted, stats.requests_refused) == (6, 2)
    assert stats.prompt_tokens == 6 * 24


def test_async_llm_tells_every_step(small_model: Path) -> None:
    exporter = Exporter()

    async def scenario() -> None:
        llm = AsyncLLM(on_step=exporter, **small_options(small_model))

        async def collect(prompt: list[int]) -> Any:
            return [o async for o in llm.generate(prompt, greedy(60))][-1]

        outputs = await asyncio.gather(*map(collect, prompts(3)))
        await asyncio.to_thread(llm.shutdown)
        finished = {f.request_id: f.metrics for f in exporter.every("finished")}
        assert finished == {o.request_id: o.outputs[0].metrics for o in outputs}
        assert [s.index for s in exporter.steps] == list(range(1, len(exporter.steps) + 1))
        stats = llm.stats()
        assert stats.generated_tokens == 180 and stats.completions_length == 3
        assert exporter.snapshots[-1] == stats

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_async_llm_survives_its_step_callback(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def on_step(stats: EngineStats) -> None:
        calls.append(stats.last_step.index)
        raise RuntimeError("exporter is broken")

    async def scenario() -> None:
        llm = AsyncLLM(on_step=on_step, **small_options(small_model))
        outputs = [o async for o in llm.generate(prompts(1)[0], greedy(10))]
        assert len(outputs[-1].outputs[0].token_ids) == 10
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert calls == [1]
    assert "exporter is broken" in caplog.text


def test_every_number_is_documented() -> None:
    for record in (EngineStats, StepStats, FinishedCompletion):
        for field in dataclasses.fields(record):
            assert f"        {field.name}: " in (record.__doc__ or ""), (record, field.name)
