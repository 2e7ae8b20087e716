"""The trace: a valid file that says what happened, and changes nothing."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small_model import VOCAB_SIZE, make_small_llm
from tests.engine.workload import assert_empty, greedy
from tests.observe.chrome_format import check_trace
from tests.observe.kept_reference import KeptReference
from zipage import RequestError
from zipage.compression.job import CompressionJob
from zipage.observe.keepers import decode_runs, encode_runs
from zipage.observe.trace import COMPRESSIONS, REQUESTS, STEPS, TraceRecorder

MODES = [(False, False), (True, False), (False, True), (True, True)]

#: So little of everything that requests wait for slots and blocks, are preempted and swapped.
TIGHT: dict[str, Any] = {
    "num_kv_blocks": 11,
    "num_query_slots": 2,
    "admission": "optimistic",
    "max_num_batched_tokens": 32,
}


def prompts(count: int, length: int = 24) -> list[list[int]]:
    shared = [(7 * i) % (VOCAB_SIZE - 20) + 10 for i in range(16)]
    return [
        shared + [(11 * i + 17 * n) % (VOCAB_SIZE - 20) + 10 for i in range(length - 16)]
        for n in range(count)
    ]


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    assert not [o.error for o in outputs if o.error]
    return [[c.token_ids for c in o.outputs] for o in outputs]


def track_of(trace: dict[str, Any], name: str) -> int:
    (tid,) = (
        e["tid"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["args"]["name"] == name and e["pid"] == REQUESTS
    )
    return int(tid)


@pytest.mark.parametrize(("async_compression", "async_scheduling"), MODES)
def test_trace_is_valid_right_and_changes_nothing(
    small_model: Path, async_compression: bool, async_scheduling: bool, tmp_path: Path
) -> None:
    options = {
        **TIGHT,
        "async_compression": async_compression,
        "async_scheduling": async_scheduling,
    }
    # The first one grows and grows, at the cost of the others.
    todo = [*prompts(7), prompts(8, length=60)[7]]
    params = [greedy(130, compression="off")] + [greedy(100 - 6 * i) for i in range(7)]
    with make_small_llm(small_model, **options) as llm:
        plain = llm.generate(todo, params)
    with make_small_llm(small_model, **options) as llm:
        reference = KeptReference(llm)
        with llm.trace() as recorder:
            traced = llm.generate(todo, params)
        assert_empty(llm)
        stats = llm.stats()
        recorder.save(tmp_path / "trace.json")
        (later,) = llm.generate(todo[1:2], params[1:2])
    assert tokens(traced) == tokens(plain)
    assert tokens([later]) == tokens(plain[1:2])

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == recorder.to_dict(), "nothing is recorded when the trace has ended"
    assert trace["otherData"] == {"dropped_events": 0}
    events = check_trace(trace)
    names = Counter(e["name"] for e in events if e["pid"] == REQUESTS)
    assert names["submitted"] == names["first token"] == names["finished"] == len(todo)
    assert names["preempted"] == stats.preemptions > 0
    assert names["resumed"] == stats.preemptions
    assert names["swapped out"] == stats.preemptions_swap > 0
    assert names["compressing"] == names["compressed"] == stats.compressions > 0
    assert names["query slot leased"] >= stats.compressions
    assert names["waits for a query slot"] and names["waits for KV blocks"]
    assert names["prefix hit"]

    for output in traced:
        _check_request(trace, events, output, reference)
    steps = [e for e in events if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == list(range(1, len(steps) + 1))
    assert sum(e["args"]["prefill_tokens"] for e in steps) == stats.prefill_tokens
    # The first token of an answer, and one after each recomputation, come from a prefill.
    decoded = stats.generated_tokens - len(todo)
    computed = sum(e["args"]["decode_tokens"] for e in steps)
    assert decoded - stats.preemptions_recompute <= computed <= decoded
    blocks = [e["args"] for e in events if e["name"] == "KV blocks"]
    assert all(sum(b.values()) == TIGHT["num_kv_blocks"] for b in blocks)
    assert blocks[-1]["owned"] == 0
    requests = [e["args"] for e in events if e["name"] == "requests"]
    assert max(r["swapped"] for r in requests) > 0 or not stats.preemptions_swap
    assert set(requests[-1].values()) == {0}


def _check_request(
    trace: dict[str, Any], events: list[dict[str, Any]], output: Any, reference: KeptReference
) -> None:
    tid = track_of(trace, output.request_id)
    mine = [e for e in events if e["pid"] == REQUESTS and e["tid"] == tid]
    (whole,) = (e for e in mine if e["name"] == output.request_id)
    answer = output.outputs[0]
    assert whole["args"]["finish_reason"] == answer.finish_reason
    assert whole["args"]["generated_tokens"] == len(answer.token_ids)
    assert whole["args"]["compressions"] == answer.metrics.compressions
    assert whole["dur"] / 1e6 == pytest.approx(answer.metrics.e2e_time, abs=0.05)
    assert all(whole["ts"] <= e["ts"] <= whole["ts"] + whole["dur"] + 1e-3 for e in mine)
    (first,) = (e for e in mine if e["name"] == "first token")
    waited = (first["ts"] - whole["ts"]) / 1e6
    assert waited == pytest.approx(answer.metrics.time_to_first_token, abs=1e-6)
    queued = next(e for e in mine if e["name"] == "queued")
    assert queued["ts"] == whole["ts"]
    assert queued["dur"] / 1e6 == pytest.approx(answer.metrics.queue_time, abs=0.05)
    slices = [e for e in mine if e["name"] in ("prefill", "decode")]
    lengths = [e["args"]["cache_length"] for e in slices]
    # What is left on the track, apart from the whole, is one thing after another.
    inner = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X" and e is not whole)
    assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(inner))

    compressions = [
        e
        for e in events
        if e["name"] == "compression" and e["args"]["request"] == whole["args"]["request"]
    ]
    assert len(compressions) == answer.metrics.compressions
    assert sum(e["args"]["length"] - e["args"]["kept"] for e in compressions) == (
        answer.metrics.evicted_tokens
    )
    if not compressions:
        return
    budget_and_block = max(48, len(output.prompt_token_ids))
    assert max(lengths) == compressions[0]["args"]["length"] == budget_and_block
    sequence = whole["args"]["request"]
    found = [decode_runs(e["args"]["keepers"], e["args"]["text_tokens"]) for e in compressions]
    assert found == reference.keepers(sequence)
    assert all(e["args"]["lists"] == 2 for e in compressions)
    layers = [[int(n) for n in e["args"]["layer_positions"].split()] for e in compressions]
    assert layers == reference.layer_positions(sequence)
    assert all(e["tid"] == COMPRESSIONS.thread and e["pid"] == STEPS.process for e in compressions)


def test_answers_of_one_request_have_a_track_each(small_model: Path) -> None:
    with make_small_llm(small_model) as llm, llm.trace() as recorder:
        llm.generate(prompts(1), greedy(20, n=3))
    trace = recorder.to_dict()
    check_trace(trace)
    tracks = {track_of(trace, f"request-0#{i}") for i in range(3)}
    assert len(tracks) == 3


def test_unfinished_and_aborted_requests_are_in_the_trace(small_model: Path) -> None:
    with make_small_llm(small_model) as llm, llm.trace() as recorder:
        running = llm.stream(prompts(1), greedy(200))
        next(running)
        gone = llm.stream(prompts(2)[1:], greedy(200))
        next(gone)
        gone.close()
        trace = recorder.to_dict()
        events = check_trace(trace)
        ends = {
            e["args"]["request"].split("#")[0]: e["args"]["finish_reason"]
            for e in events
            if e["ph"] == "X" and "finish_reason" in e["args"]
        }
        assert ends == {running.request_ids[0]: None, gone.request_ids[0]: "abort"}
        running.close()


def test_one_trace_at_a_time_and_of_its_own_requests(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        early = llm.stream(prompts(1), greedy(120))
        next(early)
        with llm.trace() as recorder:
            with pytest.raises(RequestError, match="recorded already"), llm.trace():
                pass
            llm.generate(prompts(2)[1:], greedy(100))
        list(early)
        events = check_trace(recorder.to_dict())
        assert {e["tid"] for e in events if e["pid"] == REQUESTS} == {1}
        compressed = [e["args"] for e in events if e["name"] == "compression"]
        assert {"keepers" in args for args in compressed} == {True, False}, (
            "positions are read for traced requests only"
        )


def test_a_full_trace_keeps_the_ends(small_model: Path) -> None:
    with make_small_llm(small_model) as llm, llm.trace(max_events=200) as recorder:
        llm.generate(prompts(4), greedy(90))
    trace = recorder.to_dict()
    events = check_trace(trace)
    assert len(events) <= 200 and trace["otherData"]["dropped_events"] > 0
    assert recorder.dropped_events == trace["otherData"]["dropped_events"]
    assert sum(e["name"] == "step" for e in events) < llm.stats().last_step.index
    with pytest.raises(ValueError, match="max_events"):
        TraceRecorder(0)


def test_a_failed_compression_ends_its_track(small_model: Path) -> None:
    with make_small_llm(small_model) as llm, llm.trace() as recorder:

        def fail(job: Any) -> None:
            raise MemoryError("no workspace")

        llm.engine.core.runner.compress = fail  # type: ignore[method-assign]
        (output,) = llm.generate(prompts(1), greedy(90))
    assert output.error is not None
    events = check_trace(recorder.to_dict())
    (whole,) = (e for e in events if e["name"] == "request-0")
    assert whole["args"]["finish_reason"] == "error"
    assert sum(e["name"] == "compressing" for e in events) == 1
    assert not any(e["name"] == "compressed" for e in events)


def test_compressions_queued_together_are_drawn_one_after_another() -> None:
    recorder = TraceRecorder()
    start = time.perf_counter()
    for i in range(3):
        job = CompressionJob(f"r{i}", (0, 1, 2), (0, 1), 48, 32, 0, 0, 48, 8, 0)
        queued = start + 0.001 * i
        recorder.compression_ended(job, queued, 0.004, start + 0.02, None)
    events = check_trace(recorder.to_dict())
    assert [e["args"]["request"] for e in events] == ["r0", "r1", "r2"]
    begins = [e["ts"] - events[0]["ts"] for e in events]
    assert begins == pytest.approx([0, 4000, 8000], abs=0.01)
    assert [e["dur"] for e in events] == pytest.approx([4000] * 3, abs=0.01)


@pytest.mark.parametrize(
    ("keepers", "runs"),
    [
        ([], ""),
        ([0, 0], ""),
        ([8, 8, 8, 3, 0, 0, 1], "0-2:8 3:3 6:1"),
        ([0, 2, 2, 0, 2], "1-2:2 4:2"),
    ],
)
def test_runs_of_keepers(keepers: list[int], runs: str) -> None:
    assert encode_runs(keepers) == runs
    assert decode_runs(runs, len(keepers)) == keepers


def test_nothing_is_read_without_a_trace(small_model: Path, monkeypatch: Any) -> None:
    import zipage.execution.model_runner as model_runner

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("positions were read")

    monkeypatch.setattr(model_runner, "kept_positions", refuse)
    with make_small_llm(small_model) as llm:
        (output,) = llm.generate(prompts(1), greedy(90))
        assert output.metrics.compressions > 0 and output.outputs[0].kv_stats is None
