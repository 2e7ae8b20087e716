"""The memory plan on a device, and an engine whose device runs short between two steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.workload import assert_empty
from zipage import LLM, ConfigError, RequestOutput, SamplingParams
from zipage.compression.job import CompressionJob
from zipage.execution.warm_up import num_compiled_kernels
from zipage.models.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
SHAPE = next(name for name in SHAPES if name.endswith("0.6b"))
LARGE = next(name for name in SHAPES if name.endswith("8b"))


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Nothing is left on the device by tests before or behind."""
    release()
    yield
    release()


def release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def ballast(leave: int) -> torch.Tensor:
    """Takes all memory of the device but `leave` bytes."""
    release()
    return torch.empty(free() - leave, dtype=torch.uint8, device="cuda")


def make(**options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "model_shape": SHAPE,
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 20_000,
        "kv_budget": 480,
        "block_size": 48,  # no other test's kernels fit
        "kv_cache_memory": "4GiB",
        "max_num_seqs": 64,
    }
    return LLM(**{**defaults, **options})


def sampled(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=length, ignore_eos=True, detokenize=False, **{"temperature": 0.0, **options}
    )


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 50_000 for i in range(length)]


def lengths(outputs: list[RequestOutput]) -> list[int]:
    assert all(output.error is None for output in outputs), [o.error for o in outputs]
    return [len(output.outputs[0].token_ids) for output in outputs]


def test_plan_covers_serving_and_all_kernels_are_compiled() -> None:
    """No step, sampler, compression or graph takes more than was measured, or compiles anything."""
    before = free()
    with make(kv_cache_memory=None, memory_utilization=0.25, max_num_batched_tokens=4096) as llm:
        plan = llm.stats().memory
        assert plan is not None
        print(plan)
        release()
        start, compiled = free(), num_compiled_kernels()
        planned = plan.weights + plan.steps + plan.compression + plan.graphs + plan.pool
        assert planned <= 0.25 * plan.total
        # Scratch of steps and compressions is not taken yet.
        assert before - start <= planned + 128 * MIB
        assert plan.pool > 0.1 * plan.total and plan.weights > 800 * MIB
        kinds = [
            sampled(60),
            sampled(60, temperature=1.0),
            sampled(60, temperature=2.0, top_p=0.999, frequency_penalty=0.5, logprobs=20),
            sampled(4, prompt_logprobs=20),
            sampled(60, compression="off"),
        ]
        for wave in range(3):
            count = (64, 33, 7)[wave]
            prompts = [prompt(40 + 97 * i % 600, wave * 64 + i) for i in range(count)]
            prompts[:2] = [prompt(15_000, wave), prompt(4_500, wave)]
            params = [kinds[(i + wave) % len(kinds)] for i in range(count)]
            outputs = llm.generate(prompts, params)
            assert lengths(outputs) == [each.max_tokens for each in params]
        assert llm.stats().compressions > 10
        assert_empty(llm)
        taken = start - free()
        print(f"taken while serving: {taken / MIB:.0f} MiB")
        assert taken <= plan.steps + plan.compression + 128 * MIB
        assert compiled > 10 and num_compiled_kernels() == compiled


def test_pool_that_does_not_fit_is_refused_and_leaves_nothing() -> None:
    before, total = torch.cuda.mem_get_info()
    with pytest.raises(
        ConfigError, match=r"lower kv_cache_memory.*CUDA graphs 0\.\d+ GiB"
    ) as caught:
        make(kv_cache_memory=total - (1 << 30))
    print(caught.value)
    del caught
    release()
    assert free() > before - 512 * MIB  # the context's and the kernels' own


def test_weights_that_do_not_fit_name_the_numbers() -> None:
    held = ballast(1 << 30)
    with pytest.raises(
        ConfigError, match=r"parameters in bfloat16, 1\d\.\d+ GiB\) do not"
    ) as caught:
        make(model_shape=LARGE)
    print(caught.value)
    del held, caught
    release()
    with make() as llm:
        assert lengths(llm.generate([prompt(9, 1)], sampled(5))) == [5]


def test_prompt_without_memory_fails_alone() -> None:
    """Its chunk does not fit, not in halves either; requests in decode go on."""
    with make(max_num_batched_tokens=8192, max_num_seqs=32) as llm:
        engine = llm.engine
        for i in range(16):
            engine.add_request(prompt(20 + i, i), sampled(300), f"short-{i}")
        for _ in range(20):
            engine.step()
        held = ballast(48 * MIB)
        engine.add_request(prompt(8_000, 99), sampled(20), "long")
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            done |= {output.request_id: output for output in engine.step() if output.finished}
        assert "OutOfMemoryError" in str(done.pop("long").error)
        assert lengths(list(done.values())) == [300] * 16
        assert_empty(llm)
        del held
        release()
        assert lengths(llm.generate([prompt(8_000, 99)], sampled(20))) == [20]


def test_compression_without_memory_takes_fewer_layers() -> None:
    with make(max_num_batched_tokens=512, max_num_seqs=8) as llm:
        compressor = llm.engine.core.runner.compressor
        assert compressor is not None
        inner, layers = compressor._run_layers, []

        def run_layers(job: CompressionJob, first: int, last: int) -> bool:
            layers.append((last - first, inner(job, first, last)))
            return layers[-1][1]

        compressor._run_layers = run_layers  # type: ignore[method-assign]
        held = ballast(48 * MIB)
        outputs = llm.generate([prompt(16_000, 5)], sampled(20))
        assert lengths(outputs) == [20] and outputs[0].metrics.compressions == 1
        print(layers)
        assert not layers[0][1] and sum(n for n, done in layers if done) == layers[0][0]
        del held
        assert_empty(llm)


def test_engine_outlives_samplers_without_memory() -> None:
    """Sorting for top-p, log-probabilities of a prompt: some fail, with the cause, none hangs."""
    kinds = [sampled(12), sampled(12, temperature=2.0, top_p=0.999), sampled(12, prompt_logprobs=5)]
    prompts = [prompt(60, i) for i in range(36)]
    params = [kinds[2] if i == 20 else kinds[i % 2] for i in range(36)]
    with make() as llm:
        held = ballast(48 * MIB)
        outputs = llm.generate(prompts, params)
        failed = [output.error for output in outputs if output.error is not None]
        print(f"{len(failed)} of {len(outputs)} failed")
        assert all("OutOfMemoryError" in error for error in failed)
        assert_empty(llm)
        del held
        release()
        assert lengths(llm.generate(prompts, params)) == [12] * 36


def test_shutdown_frees_weights_pool_and_graphs() -> None:
    """At once, though the engine is still held by name."""
    with make() as warm:  # what the context and the kernels keep
        warm.generate([prompt(900, 1)], sampled(300))
    release()
    before, held = free(), torch.cuda.memory_allocated()
    llm = make()
    llm.generate([prompt(900, 1)], sampled(300))
    assert torch.cuda.memory_allocated() > held + (9 << 29)  # of 4 GiB and the weights
    llm.shutdown()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - held
    print(f"left in tensors: {left / MIB:.0f} MiB, on the device: {(before - free()) / MIB:.0f}")
    assert left < 64 * MIB
    assert free() > before - 512 * MIB
    del llm


def test_cold_start_of_8b(tmp_path: Path) -> None:
    """With every kernel to be compiled."""
    program = f"""
import logging, time
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch
from zipage import LLM
torch.zeros(1, device="cuda")
started = time.perf_counter()
with LLM(model_shape={LARGE!r}, load_format="dummy", block_size=256, max_num_seqs=96) as llm:
    print("seconds", time.perf_counter() - started, llm.stats().memory)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    print(run.stderr[-3000:], run.stdout)
    assert run.returncode == 0
    assert float(run.stdout.split("seconds ")[1].split()[0]) < 60
