"""Logits equal transformers' for every family and option."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from zipage.attention.backend import make_backend
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
@pytest.mark.parametrize(
    "case",
    [
        "llama-yarn-rope",
        "qwen2",
        "qwen3-tied-biases",
        "qwen3-moe",
        "phi3-longrope",
        "llama-dynamic-rope",
    ],
)
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


BEYOND = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(6)).tolist()


def short_dynamic(checkpoint: Checkpoint, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A model with dynamic RoPE whose original length is 40 tokens."""
    path, model = checkpoint("llama-dynamic-rope")
    shutil.copytree(path, tmp_path / "short")
    raw = json.loads((path / "config.json").read_text())
    raw["max_position_embeddings"] = 40
    (tmp_path / "short" / "config.json").write_text(json.dumps(raw))
    return tmp_path / "short", model.__class__.from_pretrained(tmp_path / "short")


def stepwise_logits(model: PreTrainedModel, tokens: list[int], first: int) -> torch.Tensor:
    """transformers' logits: a prompt of `first` tokens, then one token at a time, cached."""
    rows, cache, begin = [], None, 0
    with torch.inference_mode():
        for end in (first, *range(first + 1, len(tokens) + 1)):
            out = model(torch.tensor([tokens[begin:end]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0].float())
            cache, begin = out.past_key_values, end
    return torch.cat(rows)


def test_dynamic_rope_beyond_the_original_length(
    checkpoint: Checkpoint, backend: BackendFactory, tmp_path: Path
) -> None:
    """A text that grows beyond it token by token is computed as transformers generates it."""
    path, model = short_dynamic(checkpoint, tmp_path)
    config = load_model_config(path)
    assert config.rope.original_max_positions == 40
    assert config.max_position_embeddings == 120
    expected = stepwise_logits(model, BEYOND, 30)
    decoder = load_model(config, path)
    for chunks in ([30] + [1] * 30, [1] * 60, [25, 35], [60]):
        logits = PagedRun(decoder, backend).logits(BEYOND, chunks)
        assert (logits - expected).abs().max().item() <= TOLERANCE
    # transformers rotates a prompt beyond it by the frequencies of the prompt's length, so that
    # its answer depends on how the text is cut: not reproduced, and no small matter.
    whole = model(torch.tensor([BEYOND])).logits[0]
    assert (whole - expected)[:40].abs().max().item() > 0.1


def test_longrope_within_the_original_length(
    checkpoint: Checkpoint, backend: BackendFactory
) -> None:
    """An engine for texts within it uses the short factors."""
    path, model = checkpoint("phi3-longrope")
    tokens = TOKENS[:32]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    config = load_model_config(path)
    assert config.rope.original_max_positions == 32
    logits = PagedRun(load_model(config, path, max_positions=32), backend).logits(tokens, [30, 2])
    assert (logits - expected).abs().max().item() <= TOLERANCE
    longer = PagedRun(load_model(config, path, max_positions=33), backend).logits(tokens, [32])
    assert (longer - expected).abs().max().item() > 30 * TOLERANCE


def test_engines_of_different_rope_in_one_process(checkpoint: Checkpoint) -> None:
    """A second model does not inherit the first one's tables."""
    cases = ["llama", "llama-llama3-rope", "llama-linear-rope", "llama-yarn-rope"]
    models = [checkpoint(case) for case in cases]
    runs = [PagedRun(load_model(load_model_config(path), path)) for path, _ in models]
    for run, (_, model) in zip(runs, models, strict=True):
        logits = run.logits(TOKENS, WHOLE)
        assert (logits - reference_logits(model)).abs().max().item() <= TOLERANCE


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="triton's interpreter is off or not installed",
)
@pytest.mark.parametrize("case", ["qwen3-moe-mixed", "phi3-partial-tied"])
def test_fused_layers(case: str, checkpoint: Checkpoint) -> None:
    """The decoder with Triton kernels, as on CUDA, under their interpreter."""
    path, model = checkpoint(case)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS[:7]])).logits[0]
    decoder = load_model(load_model_config(path), path)
    decoder.fuse()
    run = PagedRun(decoder, lambda cache, scale: make_backend("triton", cache, scale), max_len=16)
    logits = run.logits(TOKENS[:7], [5, 1, 1])
    assert (logits - expected).abs().max().item() <= TOLERANCE
