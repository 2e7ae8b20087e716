"""Configuration of a model that runs through transformers' own code, and whether it may.

No weights are read: the model is built from fake tensors, which have only shapes, and a forward
pass over them shows how each layer attends.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from zipage.errors import ModelError
from zipage.models.config import default_sampling, generation_defaults, read_json
from zipage.models.config_values import (
    LARGEST_SIZE,
    MALFORMED,
    MOST_EXPERTS,
    MOST_LAYERS,
    architecture_names,
    checkpoint_dtype,
    number,
    refuse_quantised,
    token_ids,
    whole_number,
)
from zipage.models.transformers_attention import PAGED, Probe, probing, register

#: Configuration class -> class of the causal language model.
CAUSAL_CLASSES: Any = MODEL_FOR_CAUSAL_LM_MAPPING
_AutoModel: Any = transformers.AutoModelForCausalLM

#: Architectures whose logits and compressed generation the tests compare with transformers'.
TESTED = (
    "GPTNeoXForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Olmo2ForCausalLM",
    "CohereForCausalLM",
    "GraniteForCausalLM",
    "Starcoder2ForCausalLM",
    "GlmForCausalLM",
    "GemmaForCausalLM",
    "NemotronForCausalLM",
    "OlmoeForCausalLM",
)

#: Conditions for a model to run, for the documentation.
CONDITIONS = (
    "transformers >= 4.53 has a causal language model of that name, without code of its own",
    "every layer calls transformers' attention interface once, with one key and one value of equal "
    "width per token, the same number of heads and the same scale in every layer",
    "attention is causal and over the whole text: no sliding window or chunk shorter than "
    "max_model_len, no sinks, no capped scores, no position biases",
    "nothing else mixes tokens: a token's computation depends on the token, its position and "
    "attention alone",
)

_MLA = "it has multi-head latent attention (kv_lora_rank), whose cache holds no keys and values"
_ALIBI = "it adds ALiBi position biases to attention scores"
_OTHER_LAYERS = (
    "it has layers that do not attend to keys and values of the whole text, such as recurrent or "
    "linear-attention ones ({})"
)

_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types")
# The probe finds out whether a window or chunk is shorter than a text.
_LAYER_TYPES = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
_RECURRENT_KEYS = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "linear_num_value_heads",
    "conv_L_cache",
    "lru_width",
)
_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_PROBE_TOKENS = 8

#: Held while transformers builds a model, as this changes torch's defaults for the whole process.
BUILD_LOCK = threading.Lock()


@dataclass(frozen=True)
class TransformersConfig:
    """One model that runs through transformers' own modelling code.

    Attributes:
        architecture: its class in transformers.
        vocab_size, hidden_size: sizes.
        intermediate_size: intermediate size of its MLP, if config.json names one.
        num_layers, num_heads, num_kv_heads, head_dim: sizes of its attention, from its calls.
        scale: factor of the attention scores.
        num_parameters: tied weights count once.
        tie_word_embeddings: the output head is the embedding matrix.
        max_position_embeddings: longest text in tokens it may run on.
        dtype: dtype of the checkpoint.
        eos_token_ids: every token that ends a text.
        bos_token_id: token that begins a text, if any.
        generation_defaults: sampling fields of generation_config.json, unchanged.
        source: transformers' own configuration.
    """

    model_impl: ClassVar[str] = "transformers"

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    num_parameters: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: Mapping[str, Any] = field(hash=False)
    source: Any = field(hash=False, repr=False)

    def default_sampling(self) -> dict[str, Any]:
        """Sampling options the model asks for, see `zipage.models.config.default_sampling`."""
        return default_sampling(self.generation_defaults)


def load_transformers_config(path: Path, max_model_len: int | None = None) -> TransformersConfig:
    """Read a model directory's configuration and check that paged attention can run the model.

    Args:
        path: a Hugging Face model directory.
        max_model_len: longest text in tokens the model will be run on, if less than its longest.

    Raises:
        ModelError: a file is missing or broken, the installed transformers does not know the
            model, or a paged cache of keys and values cannot serve its attention.
    """
    raw = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    name = f"model_type {raw.get('model_type')!r}"
    try:
        name = next(iter(architecture_names(raw)), name)
        dtype = checkpoint_dtype(raw)
        register()
        source = _source_config(path, raw)
        _check_numbers(source, raw)
        name = _causal_class(source, raw).__name__
        return _describe(name, source, dtype, generation, max_model_len)
    except ModelError as error:
        raise ModelError(
            f"{path / 'config.json'}: {name} cannot run through transformers' code: {error}"
        ) from None
    except MALFORMED as error:
        raise ModelError(
            f"{path / 'config.json'}: {name} cannot run through transformers' code: a value is "
            f"malformed ({type(error).__name__}: {error})"
        ) from error


def _source_config(path: Path, raw: Mapping[str, Any]) -> Any:
    refuse_quantised(raw)
    try:
        return transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a model's configuration class raises
        own_code = " (code from a model's own repository is never run)" * ("auto_map" in raw)
        raise ModelError(
            f"transformers {transformers.__version__} cannot read its configuration"
            f"{own_code}: {error}"
        ) from error


def _check_numbers(source: Any, raw: Mapping[str, Any]) -> None:
    """Raise ModelError for numbers that would exhaust memory or make every logit NaN."""
    limits = dict.fromkeys(_EXPERTS_KEYS, MOST_EXPERTS)
    limits |= {"num_hidden_layers": MOST_LAYERS}
    limits |= dict.fromkeys(_SIZE_KEYS, LARGEST_SIZE)
    for key, largest in limits.items():
        # From the source, which knows a family's own names for them.
        value = getattr(source, key, None)
        if value is not None:
            whole_number({key: value}, key, smallest=0, largest=largest)
    for key in raw:
        if key.endswith(("_eps", "_epsilon")) and raw[key] is not None:
            number(raw, key, 0.0, 1.0)
    for key in ("rope_scaling", "rope_parameters", "rope_theta"):
        # JSON's spelling of values that are not finite; the parameters differ between families.
        if any(word in json.dumps(raw.get(key)) for word in ("NaN", "Infinity")):
            raise ModelError(f"{key} holds a number that is not finite: {raw[key]!r}")


def _causal_class(source: Any, raw: Mapping[str, Any]) -> Any:
    """The class of a causal language model, if its configuration allows it to run."""
    obstacle = _obstacle(source)
    if obstacle:
        raise ModelError(obstacle)
    names = architecture_names(raw)
    if type(source) not in CAUSAL_CLASSES:
        raise ModelError(
            f"transformers {transformers.__version__} has no causal language model for "
            f"model_type {source.model_type!r}"
        )
    model_class = CAUSAL_CLASSES[type(source)]
    if names and model_class.__name__ not in names:
        raise ModelError(
            f"it is no causal language model; that of model_type {source.model_type!r} is "
            f"{model_class.__name__}"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"its code in transformers {transformers.__version__} does not use the attention "
            f"interface"
        )
    return model_class


def _obstacle(source: Any) -> str | None:
    """Why a configuration rules paged attention out; None if it does not."""
    if source.is_encoder_decoder:
        return "it has an encoder and cross-attention; only decoder-only models run"
    if source.get_text_config() is not source:
        return "it takes images or audio beside text; only text models run"
    if getattr(source, "kv_lora_rank", None):
        return _MLA
    if source.model_type in ("bloom", "mpt") or getattr(source, "alibi", False):
        return _ALIBI
    for key in _LAYER_TYPE_KEYS:
        other = sorted(set(getattr(source, key, None) or ()) - _LAYER_TYPES)
        if other:
            return _OTHER_LAYERS.format(f"{key}: {', '.join(other)}")
    rope = getattr(source, "rope_parameters", None) or getattr(source, "rope_scaling", None) or {}
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        return "its RoPE (rope_type dynamic) turns every token by the longest text of a step"
    for key in _RECURRENT_KEYS:
        if getattr(source, key, None):
            return _OTHER_LAYERS.format(key)
    if not isinstance(getattr(source, "max_position_embeddings", None), int):
        return "its configuration does not say how long a text may be (max_position_embeddings)"
    return None


def _describe(
    name: str,
    source: Any,
    dtype: torch.dtype,
    generation: Mapping[str, Any],
    max_model_len: int | None,
) -> TransformersConfig:
    longest = min(source.max_position_embeddings, max_model_len or source.max_position_embeddings)
    model, probe = _probe_shapes(source, longest)
    shape = probe.shape()
    bos_token_id = getattr(source, "bos_token_id", None)
    return TransformersConfig(
        architecture=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=getattr(source, "intermediate_size", None),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        tie_word_embeddings=bool(getattr(source, "tie_word_embeddings", False)),
        max_position_embeddings=longest,
        dtype=dtype,
        eos_token_ids=token_ids(generation.get("eos_token_id"))
        or token_ids(getattr(source, "eos_token_id", None)),
        bos_token_id=generation.get("bos_token_id") if bos_token_id is None else bos_token_id,
        generation_defaults=generation_defaults(generation),
        source=source,
    )


def _probe_shapes(source: Any, longest: int) -> tuple[Any, Probe]:
    """Run a few tokens through the model without weights; returns it and its attention calls."""
    length = min(_PROBE_TOKENS, longest)
    try:
        with BUILD_LOCK, FakeTensorMode(), torch.no_grad():
            model = _AutoModel.from_config(
                copy.deepcopy(source), attn_implementation=PAGED, trust_remote_code=False
            ).eval()
            # Of the ways to compute a mixture of experts, use the one that reads no values.
            if getattr(model.config, "_experts_implementation", None):
                model.config._experts_implementation = "batched_mm"
            with probing(model, longest, masks=True) as probe:
                # Given a mask of ones, transformers does not look for texts packed into one row.
                logits = model(
                    input_ids=torch.zeros(1, length, dtype=torch.long),
                    position_ids=torch.arange(length)[None],
                    attention_mask=torch.ones(1, length, dtype=torch.long),
                    use_cache=False,
                ).logits
    except ModelError:
        raise
    except Exception as error:  # a model's code may raise anything
        raise ModelError(
            f"a forward pass on shapes alone fails with {type(error).__name__}: {error}"
        ) from error
    embedded = model.get_input_embeddings().weight.shape[0]
    if logits.shape[-1] != source.vocab_size or embedded < source.vocab_size:
        raise ModelError(
            f"vocab_size {source.vocab_size} is neither the width of its logits "
            f"({logits.shape[-1]}) nor covered by its {embedded} embeddings"
        )
    return model, probe
