"""Malformed values of config.json, the index and GGUF metadata are refused by key and value."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPTNeoXConfig, PreTrainedModel

from zipage.errors import ModelError
from zipage.models.checkpoint import open_checkpoint
from zipage.models.config import load_model_config
from zipage.models.implementation import read_config
from zipage.models.loader import load_model
from zipage.models.rope import RopeParameters, build_rope_tables

from .checkpoints import LLAMA3_ROPE, LONGROPE, YARN_ROPE

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]
Edited = Callable[..., Path]

NAN, INF = float("nan"), float("inf")
# Of no legal type or in no legal range anywhere.
GARBAGE: list[Any] = ["x", [1], [[1]], {"a": 1}, NAN, INF, -INF, -3, 1.5]
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "layer_types": None}

# Case, key, its bad values, and the other keys that make it matter.
VALUES: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    *(("llama", key, [*GARBAGE, 0, True, 2**31, 10**30, 10**400], {}) for key in SIZES),
    ("llama", "num_hidden_layers", [4097], {}),
    ("llama", "rms_norm_eps", [*GARBAGE[:-1], None, 10**400], {}),
    ("llama", "dtype", [*GARBAGE, 7, "int8"], {}),
    ("llama", "torch_dtype", [*GARBAGE, 7, "int8"], {"dtype": None}),
    ("llama", "hidden_act", [*GARBAGE, None], {}),
    ("llama", "quantization_config", [*GARBAGE[:3], *GARBAGE[4:], 0, "", True], {}),
    ("llama", "architectures", [*GARBAGE[1:], 0, [None], [["LlamaForCausalLM"]]], {}),
    ("llama", "tie_word_embeddings", ["false", *GARBAGE], {}),
    ("llama", "attention_bias", ["false", *GARBAGE], {}),
    ("llama", "bos_token_id", ["x", [1], [[1]], {"a": 1}, NAN, 1.5], {}),
    ("llama", "eos_token_id", ["x", [[1]], {"a": 1}, NAN, 1.5], {}),
    ("llama", "rope_theta", [*GARBAGE[:-1], 0, 0.5, 1, True, 10**400], {"rope_parameters": None}),
    ("llama", "layer_types", [*GARBAGE, 7, [None]], {}),
    ("mistral", "sliding_window", [*GARBAGE, 0, True, 10**30], {"layer_types": None}),
    ("qwen2", "max_window_layers", [*GARBAGE, None, True, 10**30], WINDOW),
    ("qwen2", "use_sliding_window", ["false", *GARBAGE], WINDOW),
    ("qwen3-moe", "num_experts", [*GARBAGE, 0, 65537, 10**30], {"num_local_experts": None}),
    ("qwen3-moe", "num_local_experts", [*GARBAGE, 0, 65537, 10**30], {}),
    ("qwen3-moe", "num_experts_per_tok", [*GARBAGE, 0, None, 7, 10**30], {}),
    ("qwen3-moe", "mlp_only_layers", [*GARBAGE[:1], *GARBAGE[2:], 0, ["x"]], {}),
    ("qwen3-moe", "decoder_sparse_step", [*GARBAGE, 0], {}),
    ("qwen3-moe", "norm_topk_prob", ["false", *GARBAGE], {}),
]  # fmt: skip


def refused(path: Path, key: str, value: Any, model_impl: str = "auto") -> None:
    """Reading `path` raises ModelError that names the file, the key and the value."""
    with pytest.raises(ModelError) as caught:
        read_config(path, model_impl)
    message = str(caught.value)
    assert "config.json" in message and key in message, (value, message)
    digits = isinstance(value, int) and abs(value) > 10**100
    shown = "an integer of" if digits else repr(value)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        shown = ", ".join(value)
    assert shown in message, (value, message)


@pytest.mark.parametrize(
    ("case", "key", "values", "others"), VALUES, ids=[f"{row[0]}-{row[1]}" for row in VALUES]
)
def test_values(
    case: str,
    key: str,
    values: list[Any],
    others: dict[str, Any],
    checkpoint: Checkpoint,
    edited: Edited,
) -> None:
    source = checkpoint(case)[0]
    for value in values:
        refused(edited(source, **{**others, key: value}), key, value)


NUMBERS: list[Any] = ["a", [1], [[1]], True, NAN, INF, -INF, 0, -1, 1e300, 1e-300, 10**400]
LENGTHS: list[Any] = ["abc", [1], True, NAN, INF, -1, 0, 0.5, 1, 10**400]
ROPES: list[tuple[dict[str, Any], str, list[Any]]] = [
    ({"rope_type": "linear"}, "factor", NUMBERS),
    ({"rope_type": "dynamic"}, "factor", NUMBERS),
    ({"rope_type": "dynamic"}, "rope_theta", [*NUMBERS, 1, 0.5]),
    *((LLAMA3_ROPE, key, NUMBERS) for key in ("factor", "low_freq_factor", "high_freq_factor")),
    (LLAMA3_ROPE, "original_max_position_embeddings", LENGTHS),
    *(
        (YARN_ROPE, key, NUMBERS)
        for key in ("factor", "beta_fast", "beta_slow", "attention_factor")
    ),
    (YARN_ROPE, "rope_theta", [*NUMBERS, 1, 0.5]),
    (YARN_ROPE, "original_max_position_embeddings", LENGTHS),
    (YARN_ROPE, "truncate", ["false", 2, [1], NAN]),
    ({**YARN_ROPE, "mscale_all_dim": 1.0}, "mscale", [v for v in NUMBERS if v != 0]),
    ({**YARN_ROPE, "mscale": 1.0}, "mscale_all_dim", [v for v in NUMBERS if v != 0]),
    (LONGROPE, "original_max_position_embeddings", LENGTHS),
    *((LONGROPE, key, NUMBERS) for key in ("factor", "attention_factor")),
    *(
        (LONGROPE, key, [*NUMBERS, *([1.0, 1.0, 1.0, value] for value in NUMBERS)])
        for key in ("short_factor", "long_factor")
    ),
    ({"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor", [*NUMBERS, 1.5]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "key", "values"),
    ROPES,
    ids=[f"{row[0].get('rope_type', 'longrope')}-{row[1]}" for row in ROPES],
)
def test_rope_values(
    rope: dict[str, Any], key: str, values: list[Any], checkpoint: Checkpoint, edited: Edited
) -> None:
    source = checkpoint("phi3-partial-tied")[0]
    for value in values:
        parameters = {"partial_rotary_factor": 0.5, **rope, key: value}
        path = edited(
            source,
            rope_scaling=parameters,
            rope_parameters=None,
            original_max_position_embeddings=None,
        )
        with pytest.raises(ModelError, match=r"config\.json: Phi3") as caught:
            load_model_config(path)
        assert key in str(caught.value), (value, caught.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize("value", ["128", [128], NAN, 0, True, 1.5])
def test_rope_of_a_malformed_length(
    kind: str, value: Any, checkpoint: Checkpoint, edited: Edited
) -> None:
    rope = {**LLAMA3_ROPE, **LONGROPE, "rope_type": kind, "type": kind}
    for removed in () if kind == "longrope" else ("short_factor", "long_factor"):
        del rope[removed]
    path = edited(
        checkpoint("llama")[0],
        rope_scaling=rope,
        rope_parameters=None,
        max_position_embeddings=value,
    )
    refused(path, "max_position_embeddings", value)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", 0, "", [], [1], True, NAN])
def test_rope_that_is_no_object(
    key: str, value: Any, checkpoint: Checkpoint, edited: Edited
) -> None:
    changes = {"rope_scaling": None, "rope_parameters": None, key: value}
    refused(edited(checkpoint("llama")[0], **changes), key, value)


def test_rope_that_stretches_too_far(checkpoint: Checkpoint, edited: Edited) -> None:
    rope = {"rope_type": "dynamic", "factor": 1e11}
    path = edited(checkpoint("llama")[0], rope_scaling=rope, rope_parameters=None)
    with pytest.raises(ModelError, match=r"'dynamic' with factor 1e\+11 .*at most 2147483647"):
        load_model_config(path)


def test_rope_tables_without_memory() -> None:
    with pytest.raises(ModelError, match=r"tables of 100000000000000 positions.*max_model_len"):
        build_rope_tables(RopeParameters(), 64, 10**14, torch.device("cpu"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 8},
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2**20},
        {"intermediate_size": 2**31 - 1, "hidden_size": 2**24},
    ],
)
def test_weights_without_memory(
    sizes: dict[str, int], checkpoint: Checkpoint, edited: Edited
) -> None:
    path = edited(checkpoint("llama")[0], **sizes)
    shutil.copy(checkpoint("llama")[0] / "model.safetensors", path)
    with pytest.raises(ModelError, match="do not fit in memory"):
        load_model(load_model_config(path), path)


def test_an_architecture_as_a_plain_string(checkpoint: Checkpoint, edited: Edited) -> None:
    config = read_config(edited(checkpoint("qwen3")[0], architectures="Qwen3ForCausalLM"))
    assert config.model_impl == "zipage" and config.architecture == "Qwen3ForCausalLM"


def test_an_activation_points_to_the_code_that_has_it(
    checkpoint: Checkpoint, edited: Edited
) -> None:
    path = edited(checkpoint("llama")[0], hidden_act="gelu")
    with pytest.raises(ModelError, match=r"hidden_act 'gelu'.*model_impl='transformers'"):
        read_config(path)
    assert read_config(path, "transformers").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' * 100_000, "1" * 5000, "\xff"])
def test_files_that_are_no_object(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


FALLBACK: list[tuple[str, Any, str]] = [
    ("architectures", 3, "architectures must be"),
    ("architectures", [["GPTNeoXForCausalLM"]], "architectures must be"),
    ("torch_dtype", ["bfloat16"], "dtype.*bfloat16"),
    ("quantization_config", [1], "quantization_config must be an object.*1"),
    ("layer_norm_eps", NAN, "layer_norm_eps.*nan"),
    ("layer_norm_eps", "x", "layer_norm_eps.*x"),
    ("num_hidden_layers", 10**30, "num_hidden_layers.*4096.*10{30}"),
    ("hidden_size", 10**30, "hidden_size.*10{30}"),
    ("vocab_size", 10**30, "vocab_size.*10{30}"),
    ("max_position_embeddings", 10**30, "max_position_embeddings.*10{30}"),
    ("max_position_embeddings", "x", "max_position_embeddings"),
    ("rope_parameters", {"rope_type": "linear", "factor": NAN}, "rope_parameters.*nan"),
    ("rope_parameters", [1], "rope|malformed|cannot read"),
    ("layer_types", [[1]], "layer_types|malformed|cannot read"),
]


@pytest.mark.parametrize(("key", "value", "message"), FALLBACK)
def test_values_of_the_fallback(key: str, value: Any, message: str, tmp_path: Path) -> None:
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, key: value}))
    with pytest.raises(ModelError, match=rf"(?s)config\.json.*({message})"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "file",
    [3, None, ["a.safetensors"], {}, True, 1.5, "", ".", "..", "../a.safetensors",
     "sub/a.safetensors", "./a.safetensors", "a.safetensors/", "..\\a.safetensors"],
)  # fmt: skip
def test_files_of_an_index(file: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for place in (tmp_path, directory, directory / "sub"):
        save_file({"w": torch.zeros(1), "v": torch.zeros(1)}, place / "a.safetensors")
    index = {"weight_map": {"v": "a.safetensors", "w": file}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    message = rf"index\.json: the file of w must be the plain name.*{re.escape(repr(file))}$"
    with pytest.raises(ModelError, match=message), open_checkpoint(directory):
        pass


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "["])
def test_no_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with (
        pytest.raises(ModelError, match=r"index\.json is not a safetensors index"),
        open_checkpoint(tmp_path),
    ):
        pass


def test_tensors_that_the_file_of_an_index_lacks(tmp_path: Path) -> None:
    save_file({"v": torch.zeros(1)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"v": "a.safetensors", "w": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    message = r"index\.json says that w is in a\.safetensors, which has no such tensor"
    with pytest.raises(ModelError, match=message), open_checkpoint(tmp_path):
        pass
