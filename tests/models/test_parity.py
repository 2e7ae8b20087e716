"""Logits equal transformers' for every family and option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from zipage.models.config import ModelConfig, load_model_config
from zipage.models.loader import load_model
from zipage.models.rope import RopeParameters

from .checkpoints import CASES
from .paged_run import BACKENDS, BackendFactory, PagedRun

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]

LENGTH = 75
TOLERANCE = 1e-4
TOKENS = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
WHOLE = [LENGTH]
CHUNKED = [7, 1, 16, 5, 30] + [1] * 16


def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()


@pytest.mark.parametrize("case", CASES)
def test_fp32_logits(case: str, checkpoint: Checkpoint, backend: BackendFactory) -> None:
    path, model = checkpoint(case)
    expected = reference_logits(model)
    assert expected.std() > 0.5, "the logits are too flat for the tolerance to mean anything"
    decoder = load_model(load_model_config(path), path)
    for chunks in (WHOLE, CHUNKED):
        logits = PagedRun(decoder, backend).logits(TOKENS, chunks)
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama-yarn-rope", "qwen2", "qwen3-tied-biases"])
@pytest.mark.parametrize("backend_name", sorted(set(BACKENDS) - {"native"}))
def test_half_precision_logits(
    case: str, dtype: torch.dtype, backend_name: str, checkpoint: Checkpoint
) -> None:
    path, model = checkpoint(case, dtype)
    exact = reference_logits(checkpoint(case)[1])
    config = load_model_config(path)
    assert config.dtype == dtype
    decoder = load_model(config, path)
    logits = PagedRun(decoder, BACKENDS[backend_name]).logits(TOKENS, CHUNKED)
    # Both round differently; neither may be farther from fp32 than the format explains.
    theirs = (reference_logits(model) - exact).pow(2).mean().sqrt()
    ours = (logits - exact).pow(2).mean().sqrt()
    assert ours <= 1.5 * theirs


def test_loading_into_another_dtype(checkpoint: Checkpoint) -> None:
    path, model = checkpoint("qwen3", torch.bfloat16)
    decoder = load_model(load_model_config(path), path, dtype=torch.float32)
    expected = reference_logits(model.__class__.from_pretrained(path, torch_dtype=torch.float32))
    logits = PagedRun(decoder).logits(TOKENS, WHOLE)
    assert (logits - expected).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", {"norm_eps": 1e-2}),
        ("llama", {"rope": RopeParameters(theta=20000.0)}),
        ("llama-llama3-rope", {"rope": RopeParameters(theta=500000.0)}),
        ("llama-yarn-rope", {"rope": RopeParameters("linear", factor=4.0)}),
        ("llama-linear-rope", {"rope": RopeParameters("linear", factor=2.0)}),
    ],
)
def test_the_comparison_notices_a_wrong_option(
    case: str, change: dict[str, Any], checkpoint: Checkpoint
) -> None:
    path, model = checkpoint(case)
    config: ModelConfig = replace(load_model_config(path), **change)
    logits = PagedRun(load_model(config, path)).logits(TOKENS, WHOLE)
    assert (logits - reference_logits(model)).abs().max().item() > 30 * TOLERANCE
