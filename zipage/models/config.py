"""What a model directory says about its model: shapes, options, special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zipage.errors import ModelError
from zipage.models.registry import Architecture, find_architecture
from zipage.models.rope import RopeParameters, parse_rope_parameters

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_GENERATION_FIELDS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model, read from a Hugging Face directory.

    Attributes:
        architecture: name in `zipage.models.registry.ARCHITECTURES`.
        vocab_size, hidden_size, intermediate_size, num_layers: sizes.
        num_heads, num_kv_heads, head_dim: Q, H and D; Q is a multiple of H.
        norm_eps: epsilon of every RMSNorm.
        rope: rotary embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: RMSNorm over each query and key head.
        tie_word_embeddings: the output head is the embedding matrix.
        max_position_embeddings: longest text in tokens the model was made for.
        dtype: dtype of the checkpoint.
        eos_token_ids: every token that ends a text.
        bos_token_id: token that begins a text, if any.
        generation_defaults: sampling fields of generation_config.json, as they stand there.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeParameters
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


def load_model_config(path: Path) -> ModelConfig:
    """Read config.json and, where present, generation_config.json.

    Args:
        path: a Hugging Face model directory.

    Raises:
        ModelError: a file is missing or broken, or the model needs something the decoder does
            not do: another architecture, activation or RoPE type, sliding-window attention,
            quantised weights.
    """
    raw = _read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        return _parse(raw, generation)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    name, options = find_architecture(raw.get("architectures") or [])
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"quantised weights (quant_method {method!r}) are not supported; "
            f"use a float32, bfloat16 or float16 checkpoint"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported, only 'silu'")
    hidden_size = _positive(raw, "hidden_size")
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
    longest = _positive(raw, "max_position_embeddings")
    even_share = hidden_size // num_heads if hidden_size % num_heads == 0 else None
    head_dim = _positive(raw, "head_dim", options.head_dim or even_share)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads {num_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} must be even")
    _refuse_sliding_window(raw, options, num_layers, longest)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")

    bos_token_id = raw.get("bos_token_id")
    if bos_token_id is None:
        bos_token_id = generation.get("bos_token_id")

    def option(value: bool | str) -> bool:
        return bool(raw.get(value, False)) if isinstance(value, str) else value

    return ModelConfig(
        architecture=name,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope_parameters(raw),
        qkv_bias=option(options.qkv_bias),
        o_bias=option(options.o_bias),
        mlp_bias=option(options.mlp_bias),
        qk_norm=options.qk_norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=longest,
        dtype=DTYPES[dtype],
        eos_token_ids=_token_ids(generation.get("eos_token_id"))
        or _token_ids(raw.get("eos_token_id")),
        bos_token_id=bos_token_id,
        generation_defaults={
            key: generation[key] for key in _GENERATION_FIELDS if generation.get(key) is not None
        },
    )


def _refuse_sliding_window(
    raw: Mapping[str, Any], options: Architecture, num_layers: int, longest: int
) -> None:
    """Raise ModelError when a layer would attend to less than the whole text."""
    other = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ModelError(f"layer_types {', '.join(other)} are not supported, only full_attention")
    if options.window_switch:
        # These families use the window in the layers from max_window_layers on.
        first = raw.get("max_window_layers", 28)
        if not raw.get(options.window_switch, False) or first >= num_layers:
            return
    window = raw.get("sliding_window", options.default_window)
    if options.default_window and window is not None and window < longest:
        raise ModelError(
            f"sliding-window attention (sliding_window {window} < max_position_embeddings "
            f"{longest}) is not supported; only models that attend to the whole text are"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} is not a model directory: it has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
