"""What is read from a model directory, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from zipage import SamplingParams
from zipage.errors import ModelError
from zipage.models.config import load_model_config
from zipage.models.loader import resolve_model_path
from zipage.models.registry import ARCHITECTURES, REFUSED, UnknownArchitectureError
from zipage.models.rope import RopeParameters

from .checkpoints import CASES, LONGROPE, REMOVED

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]
Edited = Callable[..., Path]


def test_embedded_model() -> None:
    config = load_model_config(resolve_model_path(None))
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (8, 256, 768)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (320, 8192)
    assert config.norm_eps == 1e-6
    assert config.rope == RopeParameters()
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2, 0)
    assert config.bos_token_id is None
    assert config.generation_defaults == {"do_sample": False, "max_new_tokens": 4096}
    assert hash(config) == hash(load_model_config(resolve_model_path(None)))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("llama", (False, False, False, False)),
        ("llama-biases", (True, True, True, False)),
        ("mistral", (False, False, False, False)),
        ("qwen2", (True, False, False, False)),
        ("qwen3", (False, False, False, True)),
        ("qwen3-tied-biases", (True, True, False, True)),
    ],
)
def test_options(case: str, expected: tuple[bool, ...], checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint(case)[0])
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id == 1


def test_old_and_new_spelling_agree(checkpoint: Checkpoint, edited: Edited) -> None:
    path, _ = checkpoint("llama-llama3-rope", torch.bfloat16)
    config = load_model_config(path)
    assert config.rope.rope_type == "llama3"
    raw = json.loads((path / "config.json").read_text())
    rope = dict(raw.get("rope_parameters") or {**raw["rope_scaling"], "rope_theta": 500000.0})
    theta = rope.pop("rope_theta")
    spelling = {"rope_parameters": REMOVED, "dtype": REMOVED, "torch_dtype": "bfloat16"}
    old = load_model_config(edited(path, **spelling, rope_theta=theta, rope_scaling=rope))
    rope["rope_theta"] = theta
    spelling = {"rope_scaling": REMOVED, "rope_theta": REMOVED, "torch_dtype": REMOVED}
    new = load_model_config(edited(path, **spelling, rope_parameters=rope, dtype="bfloat16"))
    assert old == new
    assert old.rope == config.rope
    assert old.dtype == torch.bfloat16


@pytest.mark.parametrize("case", CASES)
def test_every_case_in_the_old_spelling(case: str, checkpoint: Checkpoint, edited: Edited) -> None:
    """`rope_theta` and `rope_scaling` at the top give what `rope_parameters` gives."""
    path, _ = checkpoint(case)
    raw = json.loads((path / "config.json").read_text())
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = rope.get("rope_type") or rope.pop("type", "default")
    new: dict[str, Any] = {"rope_parameters": {**rope, "rope_type": rope_type}}
    new["rope_parameters"].setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    removed = {"rope_theta": REMOVED, "rope_scaling": REMOVED, "partial_rotary_factor": REMOVED}
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if raw.get(key) is not None:
            new["rope_parameters"].setdefault(key, raw[key])
    config = load_model_config(edited(path, **{**removed, **new}))

    old = dict(new["rope_parameters"])
    top = {key: old.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in old}
    old.pop("rope_type", None)
    scaling = {**old, "type": rope_type} if rope_type != "default" else None
    removed = {"rope_parameters": REMOVED, "num_local_experts": REMOVED}
    if config.moe and config.moe.names.block == "mlp":
        top["num_experts"] = config.moe.num_experts
    elif config.moe:
        top["num_local_experts"] = config.moe.num_experts
    old_config = load_model_config(edited(path, **{**removed, **top, "rope_scaling": scaling}))
    assert old_config == config == load_model_config(path)


def test_mixture_of_experts(checkpoint: Checkpoint, edited: Edited) -> None:
    moe = load_model_config(checkpoint("qwen3-moe-mixed")[0]).moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (6, 3, 40)
    assert moe.layers == {1}
    assert not moe.renormalise
    moe = load_model_config(checkpoint("mixtral")[0]).moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (5, 2, 100)
    assert moe.layers == {0, 1, 2}
    assert moe.renormalise
    dense = edited(checkpoint("qwen3-moe")[0], mlp_only_layers=[0, 1, 2])
    assert load_model_config(dense).moe is None


def test_sliding_window_by_length(checkpoint: Checkpoint, edited: Edited) -> None:
    for case, changes in (
        ("phi3", {"sliding_window": 100}),
        ("mistral", {"sliding_window": 100}),
        ("qwen3", {"sliding_window": 100, "layer_types": ["sliding_attention"] * 3}),
    ):
        path = edited(checkpoint(case)[0], **changes)
        load_model_config(path, max_model_len=100)
        with pytest.raises(ModelError, match="max_model_len=100"):
            load_model_config(path, max_model_len=101)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_architectures(name: str, checkpoint: Checkpoint, edited: Edited) -> None:
    with pytest.raises(ModelError, match=f"architecture {name} is not supported: it has "):
        load_model_config(edited(checkpoint("llama")[0], architectures=[name]))


def test_unknown_architecture_is_told_apart(checkpoint: Checkpoint, edited: Edited) -> None:
    assert not REFUSED.keys() & ARCHITECTURES.keys()
    with pytest.raises(UnknownArchitectureError, match=r"config\.json.*GPT2LMHeadModel"):
        load_model_config(edited(checkpoint("llama")[0], architectures=["GPT2LMHeadModel"]))


def test_default_sampling() -> None:
    config = load_model_config(resolve_model_path(None))

    def defaults(generation: dict[str, Any]) -> dict[str, Any]:
        return replace(config, generation_defaults=generation).default_sampling()

    assert defaults({}) == {"temperature": 0.0}
    assert defaults({"do_sample": False, "top_p": 0.9}) == {"temperature": 0.0}
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults({**qwen, "max_new_tokens": 10}) == expected
    assert defaults({"do_sample": True}) == {"temperature": 1.0}
    penalised = {"temperature": 0.0, "repetition_penalty": 1.1}
    assert defaults({"temperature": 0.6, "repetition_penalty": 1.1}) == penalised
    SamplingParams.from_dict(defaults(qwen))


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"do_sample": True, "top_p": 0.0}, "top_p=0.0 is not legal: must be a number above 0"),
        ({"do_sample": True, "temperature": "0.6"}, "temperature='0.6' is not legal"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not legal"),
        ({"do_sample": "false"}, "do_sample must be true or false, got 'false'"),
    ],
)
def test_illegal_sampling_defaults(
    generation: dict[str, Any], message: str, checkpoint: Checkpoint, edited: Edited
) -> None:
    """Else every request without parameters would be refused for what it never said."""
    path = edited(checkpoint("llama")[0])
    (path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ModelError, match=re.escape(f"generation_config.json: {message}")):
        load_model_config(path)


def test_unused_sampling_defaults_may_be_illegal(checkpoint: Checkpoint, edited: Edited) -> None:
    path = edited(checkpoint("llama")[0])
    (path / "generation_config.json").write_text('{"do_sample": false, "top_p": 0, "top_k": null}')
    assert load_model_config(path).default_sampling() == {"temperature": 0.0}


def test_head_dim(checkpoint: Checkpoint, edited: Edited) -> None:
    assert load_model_config(checkpoint("llama-head-dim")[0]).head_dim == 24
    assert load_model_config(edited(checkpoint("qwen2")[0], head_dim=REMOVED)).head_dim == 16
    assert load_model_config(edited(checkpoint("qwen3")[0], head_dim=REMOVED)).head_dim == 128
    assert load_model_config(edited(checkpoint("llama")[0], head_dim=None)).head_dim == 16


def test_end_tokens(checkpoint: Checkpoint, edited: Edited) -> None:
    path = edited(checkpoint("llama")[0], eos_token_id=[5, 6])
    assert load_model_config(path).eos_token_ids == (5, 6)
    generation = {"eos_token_id": [7, 8, 9], "temperature": 0.6, "top_p": None, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    config = load_model_config(path)
    assert config.eos_token_ids == (7, 8, 9)
    assert config.generation_defaults == {"temperature": 0.6}
    (path / "generation_config.json").write_text('{"do_sample": true}')
    assert load_model_config(path).eos_token_ids == (5, 6)
    assert load_model_config(edited(path, eos_token_id=REMOVED)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mistral", {"sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}),
        ("llama", {"sliding_window": 32}),
    ],
)
def test_unused_sliding_window(
    case: str, changes: dict[str, Any], checkpoint: Checkpoint, edited: Edited
) -> None:
    load_model_config(edited(checkpoint(case)[0], **changes))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaFor.*Qwen3For"),
        ("llama", {"architectures": REMOVED}, "unsupported architecture: none"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'.*'silu'"),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "LlamaForCausalLM: .*spiral"),
        ("llama", {"partial_rotary_factor": 0.5}, "LlamaFor.*partial_rotary_factor 0.5"),
        ("phi3-partial-tied", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotates 3 of"),
        (
            "phi3-longrope",
            {"rope_scaling": {**LONGROPE, "partial_rotary_factor": 1.0}},
            "needs 8",
        ),
        ("phi3", {"sliding_window": 100}, "sliding_window 100.*max_model_len=100"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 5"),
        ("qwen3-moe", {"moe_intermediate_size": REMOVED}, "moe_intermediate_size"),
        ("llama", {"eos_token_id": "2"}, "eos_token_id.*'2'"),
        ("llama", {"num_hidden_layers": REMOVED}, "num_hidden_layers.*None"),
        ("llama", {"hidden_size": -3}, "hidden_size.*-3"),
        ("llama", {"vocab_size": True}, "vocab_size"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"head_dim": None, "hidden_size": 66}, "head_dim"),
        ("llama", {"dtype": "int8"}, "int8.*bfloat16"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("mistral", {"sliding_window": 32}, "MistralForCausalLM: .*sliding_window 32"),
        ("mistral", {"sliding_window": REMOVED, "max_position_embeddings": 9000}, "window 4096"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
            "sliding_window 32",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "sliding_attention",
        ),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_refusals(
    case: str, changes: dict[str, Any], message: str, checkpoint: Checkpoint, edited: Edited
) -> None:
    path = edited(checkpoint(case)[0], **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(path)
    assert str(path / "config.json") in str(caught.value)


def test_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not a model directory.*config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        load_model_config(tmp_path)
