"""`DecodeGraphs` as it is, with Triton's interpreter and a stand-in for CUDA's graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.small_model import make_small_llm
from tests.engine.workload import greedy
from zipage import LLM, SamplingParams
from zipage.attention.backend import StepInputs
from zipage.execution import cuda_graphs
from zipage.execution.cuda_graphs import DecodeGraphs, graph_batch_sizes

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles, and for CUDA only"
    ),
]


class Event:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


class Graph:
    """Remembers the step whose forward pass was captured, and replays that."""

    capturing: Graph | None = None
    captured: tuple[RecordingGraphs, StepInputs, Any]
    stream: Stream | None

    def pool(self) -> int:
        return 0

    def replay(self) -> None:
        owner, step, plan = self.captured
        owner._backend._plan = plan
        DecodeGraphs._forward(owner, step)


class RecordingGraphs(DecodeGraphs):
    replays = 0

    def _forward(self, step: StepInputs) -> None:
        if Graph.capturing is not None:
            Graph.capturing.captured = (self, step, self._backend._plan)

    def run(self, batch: cuda_graphs.DecodeBatch) -> cuda_graphs.DecodeOutput:
        self.replays += 1
        return super().run(batch)


@contextmanager
def capture(
    graph: Graph, pool: int | None, stream: Stream | None = None, capture_error_mode: str = ""
) -> Iterator[None]:
    Graph.capturing, graph.stream = graph, stream
    yield
    Graph.capturing = None


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


def with_graphs(path: Path, **options: Any) -> tuple[LLM, RecordingGraphs]:
    llm = make_small_llm(path, attention_backend="triton", **options)
    runner = llm.engine.core.runner
    width = runner._tables.shape[1]
    graphs = RecordingGraphs(runner.model, runner.backend, runner._last_tokens, width)
    graphs.capture()
    runner.graphs = graphs
    return llm, graphs


PROMPTS = [[5, 6, 7] * 7 + [9], [8] * 3, [11, 12] * 9 + [3]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, compression="off"),
]


@pytest.mark.usefixtures("no_retries")
@pytest.mark.parametrize("ahead", [False, True])
def test_replays_give_the_texts_of_plain_steps(small_model: Path, ahead: bool) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "kv_budget": 16, "window": 8}
    with make_small_llm(small_model, attention_backend="torch", **options) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    llm, graphs = with_graphs(small_model, async_scheduling=ahead, **options)
    with llm:
        replayed = llm.generate(PROMPTS, PARAMS)
    assert graphs.replays > 15
    assert sum(output.metrics.compressions for output in replayed) > 0
    for one, other in zip(plain, replayed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(("function", "ahead"), [("run", False), ("update_tables", True)])
def test_out_of_memory_at_a_replay_takes_smaller_ones(
    small_model: Path, ahead: bool, function: str
) -> None:
    """Before a replay or after it; nobody fails, and no token is another one."""
    options: dict[str, Any] = {"max_num_seqs": 3, "kv_budget": 16, "window": 8}
    params = [replace(each, max_tokens=9) for each in PARAMS]
    with make_small_llm(small_model, attention_backend="torch", **options) as llm:
        plain = llm.generate(PROMPTS, params)
    llm, graphs = with_graphs(small_model, async_scheduling=ahead, **options)
    inner, calls, failures = getattr(graphs, function), 0, 0

    def short(given: Any) -> Any:
        nonlocal calls, failures
        calls += 1
        running = len(llm.engine.core.scheduler.running)
        fails = len(given.input_ids) > 2 if function == "run" else running > 1 and calls % 3 == 0
        if fails and calls % 2:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        output = inner(given)
        if fails:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output

    setattr(graphs, function, short)
    with llm:
        replayed = llm.generate(PROMPTS, params)
    assert failures > 1
    for one, other in zip(plain, replayed, strict=True):
        assert other.error is None
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.usefixtures("no_retries")
def test_batch_invariant_replays(small_model: Path) -> None:
    """Products and attention of their own kernels in the graph, padded to another batch size."""
    prompts, params = [PROMPTS[1], PROMPTS[2][:5]], [greedy(5, logprobs=0), greedy(3, logprobs=0)]
    with make_small_llm(small_model, attention_backend="torch") as llm:
        plain = llm.generate(prompts, params)
    llm, graphs = with_graphs(small_model, batch_invariant=True)
    with llm:
        replayed = llm.generate(prompts, params)
        assert llm.engine.core.runner.backend.batch_invariant
    assert graphs.replays == 4
    for one, other in zip(plain, replayed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs is not None
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            for token_id, entry in mine.items():
                assert abs(entry.logprob - theirs[token_id].logprob) < 1e-4


@pytest.mark.usefixtures("no_retries")
def test_graphs_own_what_they_touch(small_model: Path) -> None:
    """A replay writes where the capture did: that memory must never be given to others."""
    llm, graphs = with_graphs(small_model, max_num_seqs=5)
    owned = {
        tensor.untyped_storage().data_ptr()
        for tensor in (
            graphs._input_ids,
            graphs._used_tables,
            graphs._query_start,
            graphs._device_inputs.buffer,
        )
    }
    assert sorted(graphs._graphs) == graph_batch_sizes(5)
    for graph in graphs._graphs.values():
        _, step, plan = graph.captured  # type: ignore[attr-defined]
        touched = [value for value in vars(step).values() if isinstance(value, torch.Tensor)]
        units = plan.decodes
        touched += [units.units, units.unit_starts, units.num_units]
        assert {tensor.untyped_storage().data_ptr() for tensor in touched} <= owned
    llm.shutdown()


@pytest.mark.usefixtures("no_retries")
def test_captures_take_a_stream_of_their_device(small_model: Path) -> None:
    """Torch's own is one for all engines of the process, on the device of the first."""
    llm, graphs = with_graphs(small_model, max_num_seqs=3)
    streams = {graph.stream for graph in graphs._graphs.values()}  # type: ignore[attr-defined]
    (stream,) = streams  # one, so that the graphs share memory
    assert stream is not None and stream.device == graphs._model.device
    llm.shutdown()
