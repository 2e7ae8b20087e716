"""Dummy weights: named shapes, and engines without a tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from zipage import LLM, EngineConfig, SamplingParams
from zipage.bench.offline import run_offline
from zipage.bench.workloads import BenchRequest
from zipage.cli import app
from zipage.errors import ConfigError, ModelError, RequestError
from zipage.models.config import load_model_config, shape_model_config
from zipage.models.decoder import Decoder
from zipage.models.loader import load_model, resolve_model_path
from zipage.models.shapes import SHAPES

# Published totals of parameters.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "r1-llama-8b": 8_030_261_248,
    "r1-qwen-7b": 7_615_616_512,
}
IDS_ONLY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters(shape: str) -> None:
    config = shape_model_config(shape)
    decoder = Decoder(config, config.dtype, torch.device("meta"), max_positions=1)
    assert decoder.num_parameters == PARAMETERS[shape]
    assert config.dtype == torch.bfloat16
    assert config.max_position_embeddings == (131072 if shape.startswith("r1") else 40960)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """The config of zipage-tiny as a named shape."""
    raw = json.loads((resolve_model_path(None) / "config.json").read_text())
    monkeypatch.setitem(SHAPES, "tiny", raw)
    return "tiny"


def engine(**options: Any) -> LLM:
    return LLM(
        **{
            "load_format": "dummy",
            "kv_cache_memory": "8MiB",
            "kv_budget": 128,
            "max_num_seqs": 4,
            **options,
        }
    )


def test_engine_without_a_tokenizer(tiny_shape: str) -> None:
    with engine(model_shape=tiny_shape) as llm:
        assert not llm.engine.has_tokenizer
        outputs = llm.generate([[1, 2, 3], [4, 5]], IDS_ONLY)
        for output in outputs:
            completion = output.outputs[0]
            assert len(completion.token_ids) == 5
            assert (completion.text, completion.finish_reason) == ("", "length")
        again = llm.generate([[1, 2, 3]], replace(IDS_ONLY, logprobs=1))
        assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert again[0].outputs[0].logprobs is not None
        streamed = list(llm.stream([1, 2, 3], IDS_ONLY))
        assert streamed[-1].outputs[0].token_ids == outputs[0].outputs[0].token_ids

        with pytest.raises(ModelError, match=r"model_shape='tiny' has no tokenizer.*token ids"):
            llm.generate("text", IDS_ONLY)
        with pytest.raises(ModelError, match="detokenize=False"):
            llm.generate([1, 2, 3])
        with pytest.raises(ModelError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "text"}])
        assert not llm.engine.has_unfinished


def test_seed_decides_the_weights(tiny_shape: str) -> None:
    answers = []
    for seed in (0, 0, 1):
        with engine(model_shape=tiny_shape, seed=seed) as llm:
            answers.append(llm.generate([7, 8, 9], IDS_ONLY)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_config_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(resolve_model_path(None) / "config.json", tmp_path)
    with engine(model=str(tmp_path)) as llm:
        assert not llm.engine.has_tokenizer
        assert len(llm.generate([1, 2], IDS_ONLY)[0].outputs[0].token_ids) == 5


def test_a_tokenizer_of_its_own(tiny_shape: str) -> None:
    with engine(model_shape=tiny_shape, tokenizer=str(resolve_model_path(None))) as llm:
        assert llm.generate("What", SamplingParams(max_tokens=3))[0].finished


def test_weights_longer_than_the_random_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipage.models.loader._DUMMY_LENGTH", 1009)
    config = load_model_config(resolve_model_path(None))
    decoder = load_model(config, None, torch.float32, load_format="dummy")
    weight = decoder.decoder_layers[3].gate_up_weight
    assert 0.018 < weight.std().item() < 0.022
    assert weight.unique(dim=0).shape[0] == min(1009, weight.shape[0])
    assert torch.equal(weight.flatten()[:500], weight.flatten()[1009:1509])


def test_benchmark_without_a_tokenizer(tiny_shape: str) -> None:
    with engine(model_shape=tiny_shape) as llm:
        results = run_offline(llm, [BenchRequest([1, 2, 3], 6), BenchRequest([9] * 20, 4)])
    assert results[0].generated_tokens == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_shape": "gpt-5", "load_format": "dummy"}, "gpt-5.*qwen3-0.6b.*r1-qwen-7b"),
        ({"model_shape": "qwen3-8b"}, "load_format='dummy'"),
        ({"model_shape": "qwen3-8b", "load_format": "dummy", "model": "x"}, "no model"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)


def test_command_line() -> None:
    result = CliRunner().invoke(app, ["bench", "offline", "--model-shape", "qwen3-0.6b"])
    assert result.exit_code != 0
    assert "load_format='dummy'" in result.output + str(result.exception)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(detokenize="no")  # type: ignore[arg-type]
