"""The memory plan and the warm-up behind it, on the CPU with a stand-in for a device's counters."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small_model import make_small_llm
from tests.engine.workload import assert_empty, tokens_of
from zipage import LLM, ConfigError, SamplingParams, config
from zipage.compression.compressor import Compressor
from zipage.config import EngineConfig
from zipage.engine.scheduler import StepPlan
from zipage.execution import memory as memory_module
from zipage.execution import model_runner
from zipage.execution.memory import MemoryPlan, block_bytes, pool_bytes
from zipage.execution.model_runner import ModelRunner
from zipage.execution.warm_up import trial_steps

MIB = 1 << 20
WEIGHTS, STEPS, COMPRESSION, GRAPHS = 7 * MIB, 30 * MIB, 11 * MIB, 3 * MIB


class Counters:
    """A device of which this engine takes what the constants above say, and others `others`."""

    total = 1000 * MIB
    device = torch.device("cpu")

    def __init__(self, others: int = 0) -> None:
        start = self.total - others
        # Asked before loading, after it, and before and after each trial. Some of what steps took
        # is never given back.
        tiny = start - WEIGHTS - 2 * MIB
        rest = tiny - STEPS // 3
        self._free = [start, start - WEIGHTS, tiny, tiny - STEPS]
        self._free += [rest, rest - COMPRESSION, rest, rest - GRAPHS]
        self.released = 0

    def free(self) -> int:
        return self._free.pop(0)

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Counters]:
    """The device of the engines made in the test; replace its entry for another one."""
    counters = [Counters()]
    monkeypatch.setattr(model_runner, "device_memory", lambda device: counters[0])
    return counters


def test_the_pool_gets_what_is_left_of_the_share(
    small_model: Path, device: list[Counters], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "zipage"),
        make_small_llm(small_model, num_kv_blocks=None, memory_utilization=0.4) as llm,
    ):
        plan, spec = llm.stats().memory, llm.engine.core.runner.cache.spec
    assert plan is not None
    assert plan == MemoryPlan(
        1000 * MIB, 1000 * MIB, WEIGHTS, STEPS, COMPRESSION, GRAPHS, pool_bytes(spec)
    )
    room = 400 * MIB - WEIGHTS - STEPS - COMPRESSION - GRAPHS
    assert room - block_bytes(spec) < plan.pool <= room
    assert plan.left == 600 * MIB + room - plan.pool
    text = caplog.text
    assert "weights 0.01 GiB, largest steps 0.03 GiB, compression 0.01 GiB" in text
    assert "CUDA graphs 0.00 GiB, KV pool 0.34 GiB" in text
    assert re.search(r"warmed up \d+ kernels in \d+\.\d s", text)


@pytest.mark.parametrize(("others", "share", "room"), [(300, 0.5, 500), (300, 0.9, 680)])
def test_others_limit_the_pool_but_do_not_count_to_the_share(
    small_model: Path, device: list[Counters], others: int, share: float, room: int
) -> None:
    device[0] = Counters(others * MIB)
    with make_small_llm(small_model, num_kv_blocks=None, memory_utilization=share) as llm:
        plan = llm.stats().memory
        assert plan is not None
        used = plan.weights + plan.steps + plan.compression + plan.graphs + plan.pool
        size = block_bytes(llm.engine.core.runner.cache.spec)
    assert room * MIB - size < used <= room * MIB


def test_on_the_host_nothing_is_planned(small_model: Path) -> None:
    with make_small_llm(small_model) as llm:
        assert llm.stats().memory is None


@pytest.mark.parametrize(
    ("folder", "limit", "used", "prefix"),
    [
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_the_limit_of_a_container(
    folder: str,
    limit: str,
    used: str,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of either version of cgroups; files in its page cache leave room, where they are counted."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(config, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(config, "_CGROUP", tmp_path)
    assert config.host_memory_available() == 8000 * 1024
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / used).write_text("3000000\n")
    (group / "memory.stat").write_text(
        f"anon 400000\n{prefix}inactive_file 2000000\n{prefix}active_file 600000\n"
    )
    (group / limit).write_text("4000000\n")
    assert config.host_memory_available() == 4_000_000 - 400_000
    (group / "memory.stat").rename(group / "away")
    assert config.host_memory_available() == 1_000_000
    (group / "away").rename(group / "memory.stat")
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        (group / limit).write_text(unlimited)
        assert config.host_memory_available() == 8000 * 1024


@pytest.mark.parametrize(
    ("option", "value"), [("kv_cache_memory", "990MiB"), ("num_kv_blocks", 1 << 18)]
)
def test_a_pool_that_does_not_fit_beside_the_rest_is_refused(
    small_model: Path, device: list[Counters], option: str, value: Any
) -> None:
    options = {"num_kv_blocks": None, option: value}
    with pytest.raises(ConfigError) as caught:
        make_small_llm(small_model, **options)
    message = str(caught.value)
    for part in (
        f"{option}={value}",
        "lower " + option,
        "0.93 GiB left",
        "total 0.98 GiB",
        "free before loading 0.98 GiB",
        "weights 0.01 GiB",
        "largest steps 0.03 GiB",
        "compression 0.01 GiB",
        "CUDA graphs 0.00 GiB",
        "max_num_batched_tokens=64",
        "max_num_seqs=8",
        "enforce_eager=True",
    ):
        assert part in message, message


def test_a_pool_as_large_as_all_that_is_left_is_taken(
    small_model: Path, device: list[Counters]
) -> None:
    with make_small_llm(small_model, num_kv_blocks=100) as llm:
        spec = llm.engine.core.runner.cache.spec
    left = device[0].total - WEIGHTS - STEPS - COMPRESSION - GRAPHS
    slots = spec.num_query_slots * spec.query_slot_bytes
    most = (left - slots) // block_bytes(spec)
    device[0] = Counters()
    with make_small_llm(small_model, num_kv_blocks=most) as llm:
        plan = llm.stats().memory
        assert plan is not None and 0 <= plan.left < block_bytes(spec)
    device[0] = Counters()
    with pytest.raises(ConfigError, match="lower num_kv_blocks"):
        make_small_llm(small_model, num_kv_blocks=most + 1)


def test_no_room_for_one_request_names_what_took_it(
    small_model: Path, device: list[Counters]
) -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization=0.05 gives 0 KV blocks.*largest st"):
        make_small_llm(small_model, num_kv_blocks=None, memory_utilization=0.05)


def test_weights_out_of_memory_name_the_numbers(
    small_model: Path, device: list[Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.")

    monkeypatch.setattr(model_runner, "load_weights", load)
    with pytest.raises(ConfigError) as caught:
        make_small_llm(small_model)
    message = str(caught.value)
    assert re.search(r"the weights \([\d,]+ parameters in float32, 0\.00 GiB\) do not fit", message)
    assert "0.98 GiB of 0.98 GiB were free" in message
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("stage", ["steps", "compression", "graphs"])
def test_out_of_memory_before_there_is_a_pool(
    small_model: Path, device: list[Counters], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    owner, function = {
        "steps": (ModelRunner, "execute"),
        "compression": (Compressor, "warm_up"),
        "graphs": (ModelRunner, "capture_graphs"),
    }[stage]
    monkeypatch.setattr(owner, function, fail)
    with pytest.raises(ConfigError, match=f"measuring {stage}: lower max_num_batched_tokens=64"):
        make_small_llm(small_model)
    assert device[0].released == 3 + ["steps", "compression", "graphs"].index(stage) + 1


def test_out_of_memory_behind_the_plan_names_it(
    small_model: Path, device: list[Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes memory between the trials and the pool."""

    def capture(runner: ModelRunner) -> None:
        if runner.memory_plan is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ModelRunner, "capture_graphs", capture)
    with pytest.raises(ConfigError, match=r"cpu .*taken meanwhile.*weights 0.01 GiB"):
        make_small_llm(small_model)


def test_kernels_too_large_for_the_device(
    small_model: Path, device: list[Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("triton").runtime.errors

    def fail(*args: Any) -> None:
        raise errors.OutOfResources(81920, 65536, "shared memory")

    monkeypatch.setattr(ModelRunner, "execute", fail)
    with pytest.raises(ConfigError, match=r"Required: 81920, .*65536\): use attention_backend"):
        make_small_llm(small_model)


def test_other_failures_of_a_trial_are_bugs(
    small_model: Path, device: list[Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(ModelRunner, "execute", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        make_small_llm(small_model)


# ---------------------------------------------------------------------- what is tried


def sizes(plan: StepPlan) -> tuple[int, int, int]:
    """Tokens, sampled rows, longest cache."""
    longest = max(item.request.num_computed + item.num_tokens for item in plan.scheduled)
    return plan.num_tokens, sum(item.samples for item in plan.scheduled), longest


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 40, "max_num_batched_tokens": 7},
        {"max_model_len": 48, "max_num_batched_tokens": 10_000},
        {"compression": "full", "kv_budget": None, "window": None},
        {"kv_budget": None},
        {"async_scheduling": True},
        {"bounded_prefill": True, "async_compression": True},
        {"attention_backend": "torch", "compression": "random"},
        {"max_model_len": 2, "max_num_batched_tokens": 1},
    ],
)
def test_trials_are_as_large_as_serving_gets(
    small_model: Path,
    device: list[Counters],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    tried = []
    inner = ModelRunner.execute

    def execute(runner: ModelRunner, plan: StepPlan) -> Any:
        tried.append(sizes(plan))
        output = inner(runner, plan)
        assert not output.errors
        return output

    monkeypatch.setattr(ModelRunner, "execute", execute)
    with make_small_llm(small_model, **options) as llm:
        config, longest = llm.engine.config, llm.engine.max_model_len
        runner = llm.engine.core.runner
        assert runner.forward_seconds == 0 and not runner.cache.kv.any()
    rows = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    assert max(tokens for tokens, _, _ in tried) == rows
    assert max(sampled for _, sampled, _ in tried) == min(config.max_num_seqs, rows)
    assert (rows, min(config.max_num_seqs, rows)) in [step[:2] for step in tried]
    assert any(step[0] == min(rows, longest) and step[2] == longest for step in tried)


PROMPTS = [[7 + i] * (5 + 9 * i) for i in range(6)]


def generate(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(temperature=1.2 * (i % 2), max_tokens=60, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params)
    assert_empty(llm)
    assert sum(output.metrics.compressions for output in outputs) > 0
    return [tokens_of(output) for output in outputs]


@pytest.mark.parametrize("ahead", [False, True])
def test_warm_up_leaves_no_trace(small_model: Path, device: list[Counters], ahead: bool) -> None:
    """The same texts, those with unseeded draws too, as from an engine without it."""
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        assert llm.stats().memory is not None
        warmed = generate(llm)
    device.clear()
    device.append(None)  # type: ignore[arg-type]
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        assert llm.stats().memory is None
        assert generate(llm) == warmed


def test_mixed_steps_take_both_alignments() -> None:
    """Sequences of which some prefill and some decode, with and without stored queries."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)
    mixed = [step for step in trial_steps(config, 100) if 1 < len(step.parts) < 8]
    found = {((len(step.parts) + 1) % 4 == 0, step.capture) for step in mixed}
    assert found == {(a, b) for a in (False, True) for b in (False, True)}


def test_prompts_of_few_tokens_take_every_size_of_product() -> None:
    """The next power of two of the rows, from 16 on."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)

    def kind(rows: int) -> int:
        return max(16, 1 << (rows - 1).bit_length())

    tried = {kind(step.parts[0][0]) for step in trial_steps(config, 100) if len(step.parts) == 1}
    assert {kind(rows) for rows in range(4, 65, 4)} <= tried


def test_the_host_has_no_device_memory() -> None:
    assert memory_module.device_memory(torch.device("cpu")) is None
