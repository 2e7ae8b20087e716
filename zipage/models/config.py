"""The configuration in a model directory: shapes, options, special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from zipage.errors import ModelError, RequestError
from zipage.models.checkpoint import is_gguf
from zipage.models.config_values import (
    LARGEST_SIZE,
    MALFORMED,
    MOST_EXPERTS,
    MOST_LAYERS,
    architecture_names,
    checkpoint_dtype,
    flag,
    number,
    refuse_quantised,
    strings,
    token_ids,
    whole_number,
)
from zipage.models.registry import Architecture, MoENames, find_architecture
from zipage.models.rope import RopeParameters, parse_rope_parameters
from zipage.models.shapes import SHAPES
from zipage.sampling_params import SamplingParams

GENERATION_FIELDS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of some layers.

    Attributes:
        names: names of its tensors and keys in checkpoints.
        num_experts: experts per layer.
        experts_per_token: how many of them compute a token.
        intermediate_size: intermediate size of one expert.
        renormalise: the chosen experts' weights are divided by their sum.
        layers: indices of the layers that have experts; the others have a plain MLP.
    """

    names: MoENames
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    layers: frozenset[int]


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
        fused_projections: checkpoints hold q, k, v and gate, up as one tensor each.
        moe: the mixture of experts, or None.
        max_position_embeddings: longest text in tokens the model was made for, as stretched by
            ``yarn`` or ``dynamic`` RoPE.
        dtype: dtype of the checkpoint.
        eos_token_ids: every token that ends a text.
        bos_token_id: token that begins a text, if any.
        generation_defaults: sampling fields of generation_config.json, unchanged.
    """

    model_impl: ClassVar[str] = "zipage"

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
    fused_projections: bool = False
    moe: MoEConfig | None = None

    def default_sampling(self) -> dict[str, Any]:
        """Sampling options the model asks for, see the function `default_sampling`."""
        return default_sampling(self.generation_defaults)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options that a model asks for in its generation_config.json.

    Greedy unless it says ``do_sample``. Its length limit is ignored, so that reasoning models run
    to the end.

    Args:
        generation: the file's fields, unchanged.

    Returns:
        Names and values of fields of `SamplingParams`.
    """
    defaults: dict[str, Any] = {"temperature": 0.0}
    if "repetition_penalty" in generation:
        defaults["repetition_penalty"] = generation["repetition_penalty"]
    if generation.get("do_sample"):
        defaults["temperature"] = generation.get("temperature", 1.0)
        names = ("top_p", "top_k", "min_p")
        defaults |= {name: generation[name] for name in names if name in generation}
    return defaults


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of generation_config.json, unchanged.

    Raises:
        ModelError: requests without parameters of their own would be refused.
    """
    found = {key: generation[key] for key in GENERATION_FIELDS if generation.get(key) is not None}
    try:
        flag(found, "do_sample")
        SamplingParams.from_dict(default_sampling(found))
    except (ModelError, RequestError) as error:
        raise ModelError(f"generation_config.json: {error}") from None
    return found


def load_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read config.json and, if present, generation_config.json, or a GGUF file's metadata.

    Args:
        path: a Hugging Face model directory, or a GGUF file.
        max_model_len: longest text in tokens the model will be run on, if less than its longest:
            a model with a sliding window runs only on texts no longer than the window.

    Raises:
        ModelError: a file is missing or broken, or the model needs something the decoder does
            not support: another architecture, activation or RoPE type, sliding-window attention,
            quantised weights.
    """
    if is_gguf(path):
        from zipage.models.gguf import GGUFFile

        source = path
        raw, generation = GGUFFile(path).config()
    else:
        source = path / "config.json"
        raw = read_json(source)
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
    try:
        return parse_model_config(raw, generation, max_model_len)
    except ModelError as error:
        # The same type, as callers handle unknown architectures separately.
        raise type(error)(f"{source}: {error}") from None
    except MALFORMED as error:
        raise ModelError(
            f"{source} holds a malformed value ({type(error).__name__}: {error})"
        ) from error


def shape_model_config(shape: str, max_model_len: int | None = None) -> ModelConfig:
    """The config of a well-known model, one of `SHAPES`; `max_model_len` as above."""
    return parse_model_config(SHAPES[shape], {}, max_model_len)


def parse_model_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    max_model_len: int | None = None,
) -> ModelConfig:
    """Read the contents of config.json and generation_config.json; see `load_model_config`."""
    name, options = find_architecture(architecture_names(raw))
    try:
        return _parse(name, options, raw, generation, max_model_len)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def _parse(
    name: str,
    options: Architecture,
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    max_model_len: int | None,
) -> ModelConfig:
    refuse_quantised(raw)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"hidden_act {activation!r} is not supported by the decoder, only 'silu'; "
            f"model_impl='transformers' runs other activations"
        )
    hidden_size = whole_number(raw, "hidden_size")
    num_layers = whole_number(raw, "num_hidden_layers", largest=MOST_LAYERS)
    num_heads = whole_number(raw, "num_attention_heads")
    num_kv_heads = whole_number(raw, "num_key_value_heads", num_heads)
    even_share = hidden_size // num_heads if hidden_size % num_heads == 0 else None
    head_dim = whole_number(raw, "head_dim", options.head_dim or even_share)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads {num_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} must be even")
    rope = parse_rope_parameters(raw)
    rope.check_head_dim(head_dim)
    if rope.partial_rotary_factor != 1 and not options.partial_rotary:
        raise ModelError(
            f"partial_rotary_factor {rope.partial_rotary_factor} is not supported in this family"
        )
    longest = rope.stretched(whole_number(raw, "max_position_embeddings"))
    if longest > LARGEST_SIZE:
        raise ModelError(
            f"rope type {rope.rope_type!r} with factor {rope.factor:g} makes texts of {longest} "
            f"tokens; at most {LARGEST_SIZE} are possible"
        )
    _refuse_sliding_window(raw, options, num_layers, longest, max_model_len)
    bos_token_id = raw.get("bos_token_id")
    if bos_token_id is None:
        bos_token_id = generation.get("bos_token_id")
    if isinstance(bos_token_id, list):
        raise ModelError(f"bos_token_id must be one token id, got {bos_token_id!r}")
    token_ids(bos_token_id, "bos_token_id")

    def option(value: bool | str) -> bool:
        return flag(raw, value) if isinstance(value, str) else value

    return ModelConfig(
        architecture=name,
        vocab_size=whole_number(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", 0.0, 1.0),
        rope=rope,
        qkv_bias=option(options.qkv_bias),
        o_bias=option(options.o_bias),
        mlp_bias=option(options.mlp_bias),
        qk_norm=options.qk_norm,
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        max_position_embeddings=longest,
        dtype=checkpoint_dtype(raw),
        eos_token_ids=token_ids(generation.get("eos_token_id"))
        or token_ids(raw.get("eos_token_id")),
        bos_token_id=bos_token_id,
        generation_defaults=generation_defaults(generation),
        fused_projections=options.fused_projections,
        moe=_parse_moe(raw, options.moe, num_layers) if options.moe else None,
    )


def _parse_moe(raw: Mapping[str, Any], names: MoENames, num_layers: int) -> MoEConfig | None:
    """The mixture of experts, or None if no layer has one."""
    # transformers 5 saves the number of experts as num_local_experts for every family.
    named = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
    num_experts = whole_number(raw, named, largest=MOST_EXPERTS)
    experts_per_token = whole_number(raw, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ModelError(
            f"num_experts_per_tok {experts_per_token} exceeds the {num_experts} experts"
        )
    step = whole_number(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"mlp_only_layers must be a list of layers' indices, got {dense!r}")
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        return None
    renormalise = names.renormalise
    return MoEConfig(
        names,
        num_experts,
        experts_per_token,
        whole_number(raw, names.intermediate_size),
        flag(raw, renormalise) if isinstance(renormalise, str) else renormalise,
        layers,
    )


def _refuse_sliding_window(
    raw: Mapping[str, Any],
    options: Architecture,
    num_layers: int,
    longest: int,
    max_model_len: int | None,
) -> None:
    """Raise ModelError when a layer would attend to less than the whole text."""
    types = set(strings(raw, "layer_types"))
    other = sorted(types - {"full_attention", "sliding_attention"})
    if other:
        raise ModelError(f"layer_types {', '.join(other)} are not supported, only full_attention")
    named = {"sliding_window": options.default_window, "max_window_layers": 28, **raw}
    if "sliding_attention" not in types:
        if not options.window or named["sliding_window"] is None:
            return
        if options.window_switch:
            if not flag(raw, options.window_switch):
                return
            # These families use the window only in layers from max_window_layers on.
            if whole_number(named, "max_window_layers", smallest=0) >= num_layers:
                return
    elif named["sliding_window"] is None:
        raise ModelError("layer_types has sliding_attention, but there is no sliding_window")
    window = whole_number(named, "sliding_window")
    if window < min(longest, max_model_len or longest):
        raise ModelError(
            f"sliding-window attention (sliding_window {window} < max_position_embeddings "
            f"{longest}) is not supported except for texts that fit the window: "
            f"set max_model_len={window} or less"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a model directory.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} is not a model directory: it has no {file.name}") from None
    # Thousands of nested brackets raise RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content
