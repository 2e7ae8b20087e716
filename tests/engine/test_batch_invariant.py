"""`batch_invariant`: a request alone and among many gives the same bits; where it cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small_model import save_small_model, small_options
from tests.engine.workload import assert_empty, make_llm
from zipage import LLM, RequestOutput, SamplingParams
from zipage.errors import ConfigError

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Whatever may differ between two runs of a request. In `crowd` requests are cut into chunks and
#: preempted all the time.
CROWDS: dict[str, dict[str, Any]] = {
    "crowd": {"admission": "optimistic"},
    "ample": {},
    "eager": {"enforce_eager": True, "async_scheduling": False, "enable_prefix_caching": False},
}


def params_of(index: int, length: int) -> SamplingParams:
    """Every way to choose tokens in turn; greedy ones run ahead in graphs on CUDA."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": index},
        {"temperature": 0.0, "logprobs": 4},
        {"temperature": 1.0, "seed": index, "top_p": 0.9, "top_k": 40},
    ]
    kept = {"return_kv_stats": True, "ignore_eos": True, "detokenize": False}
    # Those that are never compressed grow until others must make room.
    compression = "off" if index % 5 < 2 else None
    way = ways[index % len(ways)]
    return SamplingParams(max_tokens=length, compression=compression, **kept, **way)


def told(output: RequestOutput) -> tuple[Any, ...]:
    """Tokens, log-probabilities and kept positions of a finished request."""
    assert output.error is None, output.error
    (completion,) = output.outputs
    assert completion.kv_stats is not None
    kept = [replace(record, seconds=0.0) for record in completion.kv_stats]
    return completion.token_ids, completion.logprobs, kept


def compare(options: dict[str, Any], count: int, longest: int, pool: int) -> None:
    """Some of `count` requests of mixed lengths, alone and among the others, under every crowd.

    `pool` is the blocks of the tight one.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most, (1,), generator=generator))

    prompts = [
        torch.randint(3, 300, (draw(5, longest),), generator=generator).tolist()
        for _ in range(count)
    ]
    for i in range(0, count, 4):  # found in the prefix cache, where there is one
        prompts[i] = prompts[1][: draw(5, len(prompts[1]) + 1)] + prompts[i][:9]
    params = [params_of(i, draw(longest // 4, longest)) for i in range(count)]
    targets = range(4, count, max(1, count // 8))
    ample = {**options, "num_kv_blocks": 2000}
    with LLM(**ample) as llm:
        alone = {i: told(llm.generate([prompts[i]], params[i])[0]) for i in targets}
    assert sum(len(kept) for _, _, kept in alone.values()) >= len(targets)
    for name, crowd in CROWDS.items():
        tight: dict[str, Any] = {"num_kv_blocks": 2000}
        if name == "crowd":
            tight = {"num_kv_blocks": pool, "max_num_batched_tokens": count + 33}
        with LLM(**{**options, **crowd, **tight}) as llm:
            outputs = llm.generate(prompts, params)
            stats = llm.stats()
            assert_empty(llm)
        print(f"{name}: {stats.preemptions} preemptions, {stats.mean_running:.0f} running")
        assert name != "crowd" or stats.preemptions > count // 8
        for i in targets:
            assert told(outputs[i]) == alone[i], f"{name}, request {i}"


TINY = {"block_size": 16, "kv_budget": 64, "batch_invariant": True, "max_model_len": 2048}


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_on_the_cpu(tmp_path: Path, quantization: str | None) -> None:
    path = save_small_model(tmp_path)
    options = small_options(path, batch_invariant=True, quantization=quantization)
    compare(options, count=12, longest=90, pool=16)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("model", ["zipage-tiny", "qwen3-0.6b"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_one_alone_and_among_128(device: str, model: str, quantization: str | None) -> None:
    """In bf16: the model whose answers make sense, and random weights of a real one's sizes."""
    options: dict[str, Any] = {
        **TINY,
        "device": device,
        "dtype": "bfloat16",
        "max_num_seqs": 128,
        "quantization": quantization,
    }
    if model != "zipage-tiny":
        options |= {"load_format": "dummy", "model_shape": model}
    compare(options, count=128, longest=330, pool=260)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_float32_on_cuda(device: str) -> None:
    options = {**TINY, "device": device, "dtype": "float32", "max_num_seqs": 64}
    compare(options, count=64, longest=200, pool=100)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_with_an_fp8_kv_cache(device: str) -> None:
    options = {**TINY, "device": device, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    compare({**options, "max_num_seqs": 64}, count=64, longest=200, pool=100)


def test_the_torch_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant=True with attention_backend='torch'"):
        make_llm(batch_invariant=True, attention_backend="torch")
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*bfloat16.*'native'"):
        make_llm(batch_invariant=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match="batch_invariant=1 must be True or False"):
        make_llm(batch_invariant=1)


def test_models_whose_rows_are_computed_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*transformers' own code"):
        make_llm(batch_invariant=True, model_impl="transformers")
