"""Tiny random checkpoints of every family and option."""

from __future__ import annotations

import copy
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
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 3.0}
# Of 8 rotated dimensions; transformers 4 allows no other keys.
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 4.0, 7.0],
}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

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
    "llama-dynamic-rope": ("Llama", {"rope_scaling": DYNAMIC_ROPE}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN_ROPE}),
    "qwen2-head-dim": ("Qwen2", {"head_dim": 24}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biases": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_scaling": YARN_ROPE,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24}),
    "mixtral-tied": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partial-tied": (
        "Phi3",
        {"pad_token_id": 0, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 32,
        },
    ),
    "seed-oss": (
        "SeedOss",
        {"head_dim": 24, "attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    ),
    # Every row a multiple of the 32 numbers of a quantised block.
    "llama-wide": ("Llama", {"intermediate_size": 96}),
    "qwen3-moe-wide": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "moe_intermediate_size": 32}),
    "seed-oss-tied": (
        "SeedOss",
        {"attention_bias": False, "attention_out_bias": True, "tie_word_embeddings": True},
    ),
}


# Families that the oldest supported transformers does not know are left out there.
CASES = {
    case: (family, options)
    for case, (family, options) in CASES.items()
    if hasattr(transformers, f"{family}Config")
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
    # A copy: transformers completes the rope parameters it is given in place.
    options = copy.deepcopy(options)
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
