"""Every causal language model of the installed transformers: equal logits, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zipage.errors import ModelError
from zipage.models.implementation import load_weights, read_config

from .paged_run import BACKENDS, PagedRun

TOKENS = torch.randint(3, 97, (75,), generator=torch.Generator().manual_seed(5)).tolist()
CHUNKS = [7, 1, 16, 5, 30] + [1] * 16
CPU = torch.device("cpu")
MOST_PARAMETERS = 20_000_000

#: Whatever families call their sizes.
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "dff": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def small_model(model_type: str) -> Any:
    """A small random model; raises whatever transformers raises where these sizes do not fit."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config_class = CONFIG_MAPPING[model_type]
    known = config_class()
    config = config_class(**{key: size for key, size in SMALL.items() if hasattr(known, key)})
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters} parameters")
    torch.manual_seed(1)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
        elif "norm" not in name:
            weight.data.normal_(0, 0.2)
    return model


@pytest.mark.slow
def test_every_architecture_is_right_or_refused(tmp_path: Path) -> None:
    backend = BACKENDS.get("native", BACKENDS["torch"])
    right, wrong = [], []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        directory = tmp_path / model_type
        try:
            reference = small_model(model_type)
            with torch.inference_mode():
                expected = reference(torch.tensor([TOKENS])).logits[0].float()
            reference.save_pretrained(directory)
        except Exception:  # not a small causal language model with these options
            continue
        try:
            config = read_config(directory, "transformers")
            model = load_weights(config, directory, torch.float32, CPU, "auto", 0)
        except ModelError:
            continue
        logits = PagedRun(model, backend).logits(TOKENS, CHUNKS)
        error = ((logits - expected).abs().max() / expected.std()).item()
        (right if error <= 1e-4 else wrong).append(f"{model_type}: {error:.1e}")
    assert not wrong
    assert len(right) >= 10, right  # 72 with transformers 5.24
