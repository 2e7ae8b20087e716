"""Writing a checkpoint as a GGUF file, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

KINDS = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
}
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
EXPERT_PARTS |= {"w1": "gate", "w3": "up", "w2": "down"}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head for a rotation of neighbouring dimensions."""
    size = weight.shape[0]
    halves = weight.reshape(heads, 2, size // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def convert(tensors: dict[str, torch.Tensor], raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under GGUF's names and in its layout."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    kind = KINDS[raw["architectures"][0]]
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if kind == "llama" and ".q_proj." in name:
            values = permute(values, raw["num_attention_heads"])
        if kind == "llama" and ".k_proj." in name:
            values = permute(values, raw["num_key_value_heads"])
        module, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if layer is None:
            found[f"{TOP[module]}.{suffix}"] = values
            continue
        block = f"blk.{layer[1]}."
        expert = re.fullmatch(r".+\.experts\.(\d+)\.(\w+)", layer[2])
        if expert is None:
            found[f"{block}{PARTS[layer[2]]}.{suffix}"] = values
        else:
            part = f"{block}ffn_{EXPERT_PARTS[expert[2]]}_exps.{suffix}"
            experts.setdefault(part, {})[int(expert[1])] = values
    for part, by_index in experts.items():
        found[part] = np.stack([by_index[index] for index in range(len(by_index))])
    return found


def llama3_factors(raw: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """The divisors of the frequencies that the converter works out for Llama 3.1's scaling."""
    dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        ratio = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (ratio - low) / (high - low)))
        factors.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def write_gguf(
    source: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `source` to `path`; norms and biases stay fp32.

    Returns:
        the tensors as written, dequantised.
    """
    raw = json.loads((source / "config.json").read_text())
    architecture = KINDS[raw["architectures"][0]]
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("test")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_dim * partial))
    if raw.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (experts := raw.get("num_local_experts") or raw.get("num_experts")) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        if "moe_intermediate_size" in raw:
            writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or raw.get(
        "original_max_position_embeddings"
    )
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
    if raw["bos_token_id"] is not None:
        writer.add_bos_token_id(raw["bos_token_id"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)

    written: dict[str, np.ndarray] = {}
    for name, values in convert(load_file(source / "model.safetensors"), raw).items():
        plain = values.ndim == 1 or name.endswith("ffn_gate_inp.weight")
        target = gguf.GGMLQuantizationType.F32 if plain else kind
        data = gguf.quantize(values, target)
        writer.add_tensor(name, data, raw_dtype=target)
        written[name] = gguf.dequantize(data, target)
    if rope_type == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(raw, rope))
    if rope_type == "longrope":
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        longer = np.log(raw["max_position_embeddings"] / original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + longer / np.log(original))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
