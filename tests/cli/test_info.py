"""`zipage info` from config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import invoke

#: The shape of Qwen3-8B.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def facts(*args: str) -> dict[str, Any]:
    result = invoke("info", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def test_sizes_of_a_known_model_without_its_weights(qwen3_8b: str) -> None:
    found = facts(qwen3_8b, "--dtype", "bfloat16", "--block-size", "256", "--device", "cpu")
    assert found["parameters"] == 8_190_735_360
    assert found["weight_bytes"] == 2 * 8_190_735_360
    assert found["kv_bytes_per_token"] == 147_456
    assert found["block_bytes_full_kv"] == 256 * 147_456
    # A score and a position, 4 bytes each, per token, layer and KV head.
    assert found["block_bytes"] == 256 * (147_456 + 36 * 8 * 8)
    assert found["query_slot_bytes"] == 36 * 24 * 32 * 128 * 2
    assert found["max_blocks"] == 2048 // 256 + 1


def test_8_bit_keys_and_values_take_half(qwen3_8b: str) -> None:
    options = (qwen3_8b, "--dtype", "bfloat16", "--device", "cpu")
    assert facts(*options, "--kv-cache-dtype", "fp8")["kv_bytes_per_token"] == 147_456 // 2


def test_a_model_in_transformers_own_code(tmp_path: Path) -> None:
    pytest.importorskip("transformers.masking_utils")
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = facts(str(tmp_path), "--device", "cpu", "--dtype", "float16")
    assert found["model_impl"] == "transformers"
    assert found["parameters"] == 20_554_567_680  # GPT-NeoX-20B
    assert found["kv_bytes_per_token"] == 44 * 64 * 96 * 2 * 2
    assert found["max_model_len"] == 2048
    assert "transformers (model_impl)" in invoke("info", str(tmp_path)).output
    refused = invoke("info", str(tmp_path), "--model-impl", "zipage")
    assert refused.exit_code != 0 and "GPTNeoXForCausalLM" in refused.stderr


def test_requests_that_fit(qwen3_8b: str) -> None:
    found = facts(
        *(qwen3_8b, "--dtype", "bfloat16", "--block-size", "256", "--device", "cpu"),
        *("--kv-cache-memory", "32GiB", "--length", "8192", "--length", "1024"),
        *("--num-query-slots", "8"),
    )
    (row,) = found["fits"]
    pool = 32 * 2**30
    assert row["kv_cache_memory"] == pool
    blocks = pool // (256 * 147_456)
    assert row["full_kv"] == {"1024": blocks // 4, "8192": blocks // 32}
    left = pool - 8 * found["query_slot_bytes"]
    assert row["with_budget"] == left // found["block_bytes"] // 9


def test_the_numbers_are_the_engines(qwen3_8b: str) -> None:
    from zipage import LLM

    found = facts("--kv-cache-memory", "64MiB", "--kv-budget", "512", "--max-num-seqs", "8")
    with LLM(kv_cache_memory="64MiB", kv_budget=512, max_num_seqs=8) as llm:
        runner = llm.engine.core.runner
        assert found["parameters"] == runner.model.num_parameters
        assert found["kv_bytes_per_token"] == runner.cache.spec.bytes_per_token
        assert found["fits"][0]["with_budget"] == runner.cache.spec.num_blocks // 9


def test_without_a_budget_there_is_no_such_column() -> None:
    found = facts("--compression", "full")
    assert found["kv_budget"] is None
    assert all(row["with_budget"] is None for row in found["fits"])
    assert len(found["fits"]) > 1
    result = invoke("info", "--compression", "full")
    assert "budget" not in result.output and "KV per token" in result.output


def test_tables() -> None:
    result = invoke("info")
    assert result.exit_code == 0
    for word in ("Qwen3ForCausalLM", "7,427,328", "8.0 KiB", "budget 2,048", "8,192 tokens"):
        assert word in result.output


@pytest.mark.parametrize("args", [["--length", "9000"], ["--max-model-len", "100000"]])
def test_lengths_beyond_the_model_are_refused(args: list[str]) -> None:
    result = invoke("info", *args)
    assert result.exit_code == 2
    assert "8192" in result.stderr


def test_a_named_shape() -> None:
    result = invoke("info", "--load-format", "dummy", "--model-shape", "qwen3-8b", "--json")
    facts = json.loads(result.stdout)
    assert facts["parameters"] == 8_190_735_360
    assert facts["kv_bytes_per_token"] == 36 * 8 * 128 * 2 * (4 if facts["device"] == "cpu" else 2)


@pytest.mark.parametrize("model", [f"{__file__}/missing", "./nonexistent", "a/b/c"])
def test_a_model_that_is_neither_here_nor_a_hub_id(model: str) -> None:
    result = invoke("info", model)
    assert result.exit_code == 2
    assert "is neither a directory nor a Hugging Face hub id" in result.stderr
    assert result.stderr == invoke("generate", "x", "--model", model).stderr
