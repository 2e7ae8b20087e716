"""A model so small that hundreds of engine runs take seconds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

import zipage
from zipage import LLM

TOKENIZER = Path(zipage.__file__).parent / "assets" / "zipage-tiny"
VOCAB_SIZE = 320


def save_small_model(path: Path, **config: Any) -> Path:
    """Write a random two-layer checkpoint whose every weight matters, with zipage-tiny's
    tokenizer."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **config}))
    for name, weight in model.named_parameters():
        scale = 0.3 if "norm" in name else 1.5 / weight.shape[-1] ** 0.5
        weight.data.normal_(1.0 if "norm" in name else 0.0, scale)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, path / file)
    return path


def small_options(path: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine on it."""
    defaults: dict[str, Any] = {
        "model": str(path),
        "device": "cpu",
        "block_size": 16,
        "kv_budget": 32,
        "window": 8,
        "num_kv_blocks": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return {**defaults, **options}


def make_small_llm(path: Path, **options: Any) -> LLM:
    """An engine on it, with small blocks and budget."""
    return LLM(**small_options(path, **options))
