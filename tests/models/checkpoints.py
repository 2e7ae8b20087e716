"""Tiny random checkpoints of every family and option."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import transformers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Every family and option; head_dim is 16 unless the case is about it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-9-3-heads": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-llama3-rope": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama-yarn-rope": ("Llama", {"rope_scaling": YARN_ROPE}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biases": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def random_model(case: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A small transformers model whose every weight is random and matters."""
    family, options = CASES[case]
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    torch.manual_seed(zlib.crc32(case.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.normal_(1.0, 0.3)
        elif name.endswith("bias"):
            weight.data.normal_(0.0, 0.5)
        else:
            weight.data.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return model.to(dtype).eval()


# Marks a config.json key to leave out.
REMOVED = object()
