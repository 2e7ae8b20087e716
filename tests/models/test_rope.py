"""RoPE tables equal transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from zipage.errors import ModelError
from zipage.models.config import load_model_config
from zipage.models.rope import RopeParameters, build_rope_tables, parse_rope_parameters

from .checkpoints import DYNAMIC_ROPE, LLAMA3_ROPE, LONGROPE, YARN_ROPE

CPU = torch.device("cpu")

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 1234567.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "yarn": {"rope_theta": 1000000.0, "rope_scaling": YARN_ROPE},
    "yarn-ramp": {"rope_scaling": {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 0.5}},
    "yarn-not-truncated": {"rope_scaling": {**YARN_ROPE, "truncate": False}},
    "yarn-attention-factor": {"rope_scaling": {**YARN_ROPE, "attention_factor": 0.7}},
    "yarn-mscale": {"rope_scaling": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5}},
}


def parse(**raw: Any) -> RopeParameters:
    return parse_rope_parameters({"max_position_embeddings": 128, **raw})


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("name", ROPES)
def test_tables(name: str, head_dim: int, tmp_path: Path) -> None:
    if name == "yarn-not-truncated" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has releases that do not know `truncate`")
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
        **copy.deepcopy(ROPES[name]),
    )
    config.save_pretrained(tmp_path)
    # Past max_position_embeddings too: no type's frequencies depend on the length.
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(
        torch.empty(0), torch.arange(300)[None]
    )
    tables = build_rope_tables(load_model_config(tmp_path).rope, head_dim, 300, CPU)
    for table, reference in zip(tables, expected, strict=True):
        assert table.dtype == torch.float32
        assert table.shape == (300, head_dim // 2)
        assert (table - reference[0, :, : head_dim // 2]).abs().max().item() <= 2e-5


def save_config(path: Path, kind: type, **options: Any) -> transformers.PretrainedConfig:
    """A config of 4 heads of 16 dimensions for 128 positions, written and read again."""
    kind(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=128,
        pad_token_id=0,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
        **copy.deepcopy(options),
    ).save_pretrained(path)
    return AutoConfig.from_pretrained(path)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_dynamic_tables_are_those_of_a_text_that_grows(spelling: str, tmp_path: Path) -> None:
    """Beyond the original length, each row equals what transformers computes when it gets there."""
    reference = LlamaRotaryEmbedding(
        save_config(tmp_path, LlamaConfig, rope_theta=5e4, rope_scaling=DYNAMIC_ROPE)
    )
    if spelling == "rope_scaling":
        rope = parse(rope_theta=5e4, rope_scaling=DYNAMIC_ROPE)
    else:
        rope = parse(rope_parameters={**DYNAMIC_ROPE, "rope_theta": 5e4})
    assert rope == load_model_config(tmp_path).rope
    cos, sin = build_rope_tables(rope, 16, 400, CPU)
    for position in (*range(0, 120, 17), *range(120, 400)):
        expected = reference(torch.empty(0), torch.tensor([[position]]))
        for table, row in zip((cos, sin), expected, strict=True):
            assert (table[position] - row[0, 0, :8]).abs().max().item() <= 5e-5, position
    plain = build_rope_tables(RopeParameters(theta=5e4), 16, 400, CPU)[0]
    assert torch.equal(cos[:128], plain[:128])
    assert (cos[200:] - plain[200:]).abs().max() > 0.1


@pytest.mark.parametrize("max_positions", [32, 33, 128])
@pytest.mark.parametrize("spelling", ["longrope", "su"])
def test_longrope_tables(spelling: str, max_positions: int, tmp_path: Path) -> None:
    """Short factors if all texts are within the original length, else long ones."""
    config = save_config(
        tmp_path,
        Phi3Config,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=32,
        rope_scaling=LONGROPE,
    )
    rope = load_model_config(tmp_path).rope
    raw = {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_scaling": {**LONGROPE, "type": spelling},
    }
    assert parse_rope_parameters(raw) == rope
    assert rope.attention_factor > 1.1
    expected = Phi3RotaryEmbedding(config)(torch.empty(0), torch.arange(max_positions)[None])
    tables = build_rope_tables(rope, 16, max_positions, CPU)
    for table, reference in zip(tables, expected, strict=True):
        assert table.shape == (max_positions, 4)
        assert (table - reference[0, :, :4]).abs().max().item() <= 2e-5


def test_partial_rotation(tmp_path: Path) -> None:
    config = save_config(tmp_path, Phi3Config, partial_rotary_factor=0.75)
    expected = Phi3RotaryEmbedding(config)(torch.empty(0), torch.arange(200)[None])
    tables = build_rope_tables(load_model_config(tmp_path).rope, 16, 200, CPU)
    for table, reference in zip(tables, expected, strict=True):
        assert table.shape == (200, 6)
        assert (table - reference[0, :, :6]).abs().max().item() <= 2e-5


def test_how_far_a_type_stretches() -> None:
    def longest(**raw: Any) -> int:
        return parse(**raw).stretched(128)

    assert longest() == 128
    assert longest(rope_scaling={"rope_type": "linear", "factor": 4.0}) == 128
    assert longest(rope_scaling={"rope_type": "dynamic", "factor": 4.0}) == 512
    assert longest(rope_scaling=YARN_ROPE) == 128
    assert longest(rope_scaling={"rope_type": "yarn", "factor": 4.0}) == 512
    assert longest(rope_scaling=LLAMA3_ROPE) == 128


def test_types_differ() -> None:
    tables = [
        build_rope_tables(parse(**raw), 64, 100, CPU)[0]
        for name, raw in ROPES.items()
        if name != "yarn-not-truncated"
    ]
    for i, a in enumerate(tables):
        for b in tables[:i]:
            assert (a - b).abs().max() > 1e-2


def test_both_spellings_are_read() -> None:
    old = parse(rope_theta=5e5, rope_scaling={**LLAMA3_ROPE, "type": "llama3"})
    new = parse(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert old == new
    assert old.theta == 5e5
    legacy = parse(rope_scaling={"type": "linear", "factor": 2.0})
    assert legacy == RopeParameters("linear", 10000.0, 2.0)
    assert parse(rope_theta=7.0, rope_scaling=None) == RopeParameters(theta=7.0)


def test_original_length_defaults_to_the_longest() -> None:
    rope = parse(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert rope.original_max_positions == 128
    rope = parse(rope_scaling=YARN_ROPE, original_max_position_embeddings=64)
    assert rope.original_max_positions == 64
    implied = parse(rope_scaling={**YARN_ROPE, "factor": None})
    assert implied.factor == 4.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral.*default, linear, dynamic, llama3"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic.*factor.*None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*short_factor.*None"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, -1]}}, "long_factor.*-1"),
        ({"rope_theta": -1.0}, "rope_theta.*-1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear.*factor.*None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor.*-1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"rope_scaling": "linear"}, "must be an object"),
    ],
)
def test_refusals(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**raw)


def test_tables_are_not_shared(checkpoint: Callable[..., Any]) -> None:
    from zipage.models.loader import load_model

    path, _ = checkpoint("llama")
    config = load_model_config(path)
    first, second = load_model(config, path), load_model(config, path, max_positions=20)
    assert first.cos.shape[0] == 128
    assert second.cos.shape[0] == 20
    assert first.cos.data_ptr() != second.cos.data_ptr()
