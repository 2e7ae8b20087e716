"""Tiny random checkpoints of architectures that the decoder does not cover."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Family, options. Every case has something the decoder has not: learned positions, LayerNorm,
#: parallel residuals, partial or interleaved rotation, scaled logits, another activation...
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT),
    "gpt-neox": ("GPTNeoX", {**_SIZES, "rotary_pct": 0.25}),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 8}),
    "opt": ("OPT", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("Phi", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", _GROUPED),
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.25, "use_qk_norm": True}),
    "granite": (
        "Granite",
        {
            **_GROUPED,
            "attention_multiplier": 0.31,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
        },
    ),
    "starcoder2": ("Starcoder2", {**_GROUPED, "use_bias": True}),
    "glm": ("Glm", {**_GROUPED, "head_dim": 16}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 32}),
    "nemotron": ("Nemotron", {**_GROUPED, "head_dim": 16}),
    "olmoe": ("Olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
}


def random_model(family: str, options: dict[str, Any]) -> transformers.PreTrainedModel:
    """A small model whose every weight is random and matters."""
    config_class = getattr(transformers, f"{family}Config")
    model_class = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(zlib.crc32(family.encode()))
    model = getattr(transformers, model_class)(config_class(**options))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            # These two scale by 1 + weight.
            near_zero = name.endswith("bias") or family in ("Gemma", "Nemotron")
            around = 0.0 if near_zero else 1.0
            weight.data.normal_(around, 0.3)
        else:
            weight.data.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return model.eval()


def save(directory: Path, family: str, options: dict[str, Any]) -> transformers.PreTrainedModel:
    """Write a random checkpoint to a directory; return its model."""
    model = random_model(family, options)
    model.save_pretrained(directory)
    return model
