"""Engines of families other than the embedded model's: batched = alone, whatever is evicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from zipage import LLM, SamplingParams

# Enough for every prompt to be compressed.
LENGTH = 36

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, 97, (length,), generator=generator).tolist()
        for length in (5, 40, 17, 1, 26)
    ]


def answer(path: Path, batches: list[list[list[int]]], **options: Any) -> list[list[int]]:
    """Greedy answers to each batch of prompts in turn, of one engine."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    settings = {
        "block_size": 16,
        "kv_budget": 16,
        "window": 8,
        "num_kv_blocks": 14,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        **options,
    }
    with LLM(str(path), **settings) as llm:
        outputs = [output for batch in batches for output in llm.generate(batch, params)]
        if settings["kv_budget"] is not None:
            assert llm.stats().compressions >= len(outputs)
        llm.engine.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("case", ["qwen3-moe", "phi3-partial-tied"])
def test_batched_equals_alone(case: str, checkpoint: Checkpoint) -> None:
    path, _ = checkpoint(case)
    together = answer(path, [prompts()])
    alone = answer(path, [[prompt] for prompt in prompts()], enable_prefix_caching=False)
    chunked = answer(path, [prompts()], max_num_batched_tokens=8, async_compression=True)
    assert together == alone == chunked
    assert together != answer(path, [prompts()], kv_budget=None)


@pytest.mark.parametrize("case", ["qwen3-moe-mixed", "phi3-longrope", "llama-dynamic-rope"])
def test_torch_backend_runs_in_bfloat16(case: str, checkpoint: Checkpoint) -> None:
    path, _ = checkpoint(case)
    answers = answer(path, [prompts()[:3]], dtype="bfloat16", attention_backend="torch")
    assert [len(tokens) for tokens in answers] == [LENGTH] * 3
