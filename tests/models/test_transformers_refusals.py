"""Models that transformers' code must not run: refused by name, from their configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from zipage import LLM
from zipage.errors import ModelError
from zipage.models.implementation import read_config

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="in older transformers some of these architectures lack the attention interface",
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

#: Architecture, configuration class, options, what the message must say.
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SIZES, "capped attention scores .softcap"),
    "gemma2 without cap": (
        *("Gemma2ForCausalLM", "Gemma2Config"),
        {**SIZES, "attn_logit_softcapping": None, "sliding_window": 64},
        "sliding window of 64 tokens, less than the 512",
    ),
    "gemma3": (
        *("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "sliding_window": 32}),
        "sliding window of 32 tokens",
    ),
    "gemma3 with images": (
        *("Gemma3ForConditionalGeneration", "Gemma3Config", {}),
        "images or audio beside text",
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**SIZES, **EXPERTS}, "attention sinks"),
    "gpt-oss without windows": (
        *("GptOssForCausalLM", "GptOssConfig"),
        {**SIZES, **EXPERTS, "layer_types": ["full_attention"] * 4},
        "attention sinks",
    ),
    "mistral": (
        *("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 128}),
        "sliding window of 128 tokens, less than the 512 of a text: set max_model_len=128",
    ),
    "cohere2": (
        *("Cohere2ForCausalLM", "Cohere2Config", {**SIZES, "sliding_window": 64}),
        "sliding window of 64 tokens",
    ),
    "olmo3": (
        *("Olmo3ForCausalLM", "Olmo3Config", {**SIZES, "sliding_window": 64}),
        "sliding window of 64 tokens",
    ),
    "llama4": (
        *("Llama4ForCausalLM", "Llama4TextConfig", {**SIZES, "attention_chunk_size": 128}),
        "not causal over a whole text of 512 tokens",
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {}, "multi-head latent attention"),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {}, "multi-head latent attention"),
    "mamba": ("MambaForCausalLM", "MambaConfig", {}, "recurrent or linear-attention"),
    "jamba": ("JambaForCausalLM", "JambaConfig", {}, "recurrent or linear-attention"),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {}, "linear_attention"),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {}, "recurrent or linear-attention"),
    "t5": ("T5ForConditionalGeneration", "T5Config", {}, "an encoder and cross-attention"),
    "bloom": ("BloomForCausalLM", "BloomConfig", {}, "ALiBi position biases"),
    "mpt": ("MptForCausalLM", "MptConfig", {}, "ALiBi position biases"),
    "falcon with alibi": ("FalconForCausalLM", "FalconConfig", {"alibi": True}, "ALiBi"),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {}, "does not use the attention interface"),
    "bert": ("BertLMHeadModel", "BertConfig", {}, "attends to later tokens"),
    "a classifier": (
        *("LlamaForSequenceClassification", "LlamaConfig", SIZES),
        "no causal language model; that of model_type 'llama' is LlamaForCausalLM",
    ),
    "dynamic rope": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {**SIZES, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type dynamic. turns every token by the longest text",
    ),
    "another scale in every layer": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
        "its layers differ in",
    ),
    "two attentions a layer": (
        *("DiffLlamaForCausalLM", "DiffLlamaConfig", SIZES),
        "attends more than once",
    ),
}


def write_config(path: Path, architecture: str, config_class: str, options: dict[str, Any]) -> None:
    config = getattr(transformers, config_class)(**options)
    config.architectures = [architecture]
    config.save_pretrained(path)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_the_reason(case: str, tmp_path: Path) -> None:
    architecture, config_class, options, reason = REFUSED[case]
    write_config(tmp_path, architecture, config_class, options)
    with pytest.raises(ModelError, match=f"{architecture} cannot run.*{reason}"):
        read_config(tmp_path, "transformers")


@pytest.mark.parametrize("case", ["gemma3", "mamba", "bloom"])
def test_the_engine_refuses_before_it_reads_weights(case: str, tmp_path: Path) -> None:
    architecture, config_class, options, reason = REFUSED[case]
    write_config(tmp_path, architecture, config_class, options)
    with pytest.raises(ModelError, match=f"{architecture} .*{reason}"):
        LLM(model=str(tmp_path), device="cpu")


def test_a_window_as_long_as_the_text_is_no_window(tmp_path: Path) -> None:
    write_config(tmp_path, "Cohere2ForCausalLM", "Cohere2Config", {**SIZES, "sliding_window": 64})
    assert read_config(tmp_path, max_model_len=64).max_position_embeddings == 64
    with pytest.raises(ModelError, match="set max_model_len=64 or less"):
        read_config(tmp_path, max_model_len=65)


def edit(path: Path, **changes: Any) -> Path:
    write_config(path, "GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights .quant_method 'awq'"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported"),
        (
            {"model_type": "house-model", "auto_map": {"AutoConfig": "code.Config"}},
            "code from a model's own repository is never run",
        ),
        ({"model_type": "never-heard-of"}, "cannot read its configuration.*never-heard-of"),
        ({"num_attention_heads": 5}, "cannot read its configuration.*hidden size"),
    ],
)
def test_configurations_that_cannot_be_read(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"(?s){reason}"):
        read_config(edit(tmp_path, **changes))


def test_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    sizes = {**SIZES, "pad_token_id": 32000}
    write_config(tmp_path, "Phi3ForCausalLM", "Phi3Config", sizes)
    with pytest.raises(ModelError, match="on shapes alone fails with AssertionError: Padding_idx"):
        read_config(tmp_path, "transformers")


def test_no_code_of_a_model_repository_runs(tmp_path: Path) -> None:
    path = edit(tmp_path, model_type="house", auto_map={"AutoConfig": "house_code.Config"})
    (path / "house_code.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ModelError, match="never run"):
        read_config(path)
    assert not any("house_code" in name for name in sys.modules)


def test_the_decoder_is_taken_where_it_covers_the_architecture(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM", "LlamaConfig", SIZES)
    assert read_config(tmp_path).model_impl == "zipage"
    assert read_config(tmp_path, "zipage").model_impl == "zipage"
    assert read_config(tmp_path, "transformers").model_impl == "transformers"


def test_the_decoder_can_be_insisted_on(tmp_path: Path) -> None:
    write_config(tmp_path, "GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES)
    assert read_config(tmp_path).model_impl == "transformers"
    with pytest.raises(ModelError, match="unsupported architecture: GPTNeoXForCausalLM"):
        read_config(tmp_path, "zipage")


def test_special_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    path = edit(tmp_path, eos_token_id=4, bos_token_id=None, torch_dtype="bfloat16")
    config = read_config(path)
    assert config.eos_token_ids == (4,) and config.bos_token_id is None
    generation = {"eos_token_id": [5, 6], "bos_token_id": 7, "top_k": 30, "num_beams": 4}
    (path / "generation_config.json").write_text(json.dumps(generation))
    config = read_config(path)
    assert config.eos_token_ids == (5, 6) and config.bos_token_id == 7
    assert config.generation_defaults == {"top_k": 30}
    (path / "generation_config.json").write_text('{"do_sample": true, "min_p": 2}')
    with pytest.raises(ModelError, match=r"generation_config\.json: min_p=2 is not legal"):
        read_config(path)


def test_reading_a_configuration_builds_no_weights(tmp_path: Path) -> None:
    """A model of 40 GB is described at once, without its memory."""
    sizes = {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
    write_config(tmp_path, "GPTNeoXForCausalLM", "GPTNeoXConfig", sizes)
    before = torch.random.get_rng_state()
    config = read_config(tmp_path)
    assert (config.num_layers, config.num_heads, config.head_dim) == (44, 64, 96)
    assert config.num_parameters == 20_554_567_680
    assert torch.equal(torch.random.get_rng_state(), before)
