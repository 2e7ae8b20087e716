"""GGUF files give what the checkpoint they were made of gives."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from zipage import LLM, SamplingParams
from zipage.errors import ModelError
from zipage.models.config import ModelConfig, load_model_config
from zipage.models.implementation import read_config
from zipage.models.loader import load_model, resolve_model_path
from zipage.models.rope import RopeParameters
from zipage.tokenizer import load_tokenizer

from .checkpoints import CASES
from .paged_run import PagedRun
from .test_parity import TOKENS, TOLERANCE, WHOLE, reference_logits

gguf = pytest.importorskip("gguf")

from .gguf_files import KINDS, convert, write_gguf  # noqa: E402  (needs the library)

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]
F16, BF16, Q8, F32 = (gguf.GGMLQuantizationType[name] for name in ("F16", "BF16", "Q8_0", "F32"))

GGUF_CASES = [
    case
    for case, (family, options) in CASES.items()
    if f"{family}ForCausalLM" in KINDS
    # llama.cpp knows neither; mixed layers of experts and MLPs are not in its files.
    and case not in ("llama-dynamic-rope", "qwen3-moe-mixed")
    and not ("attention_bias" in options and family == "Qwen3")
]


@pytest.mark.parametrize("case", GGUF_CASES)
def test_fp32_file(case: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Config, tensors and logits equal those of the safetensors twin."""
    source, model = checkpoint(case)
    path = tmp_path / "model.gguf"
    write_gguf(source, path)
    config, twin_config = load_model_config(path), load_model_config(source)
    for name in vars(twin_config).keys() - {"rope", "eos_token_ids", "qkv_bias", "o_bias"}:
        expected = getattr(twin_config, name)
        if isinstance(expected, float):
            assert getattr(config, name) == pytest.approx(expected)
        else:
            assert getattr(config, name) == expected, name
    decoder, twin = load_model(config, path), load_model(twin_config, source)
    for (name, weight), (_, expected) in zip(
        decoder.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert torch.equal(weight, expected), name
    logits = PagedRun(decoder).logits(TOKENS, WHOLE)
    assert (logits - reference_logits(model)).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("kind", [F16, BF16, Q8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", ["llama-wide", "qwen3-moe-wide"])
def test_quantised_file(case: str, kind: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A quantised file equals the checkpoint of its dequantised numbers, exactly."""
    source, _ = checkpoint(case)
    twin = tmp_path / "twin"
    twin.mkdir()
    path = tmp_path / "model.gguf"
    write_gguf(source, path, kind)
    # What the file holds, taken back to the checkpoint's names and layout by hand.
    raw = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    rounded = {
        name: round_trip(name, values, kind) if values.ndim > 1 else values
        for name, values in tensors.items()
    }
    save_file(rounded, twin / "model.safetensors")
    shutil.copy(source / "config.json", twin)
    config = load_model_config(path)
    assert config.dtype == {F16: torch.float16}.get(kind, torch.bfloat16)
    assert convert(tensors, raw).keys() == {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    logits = PagedRun(load_model(config, path, dtype=torch.float32)).logits(TOKENS, WHOLE)
    expected = PagedRun(load_model(load_model_config(twin), twin)).logits(TOKENS, WHOLE)
    assert (logits - expected).abs().max().item() <= 1e-5
    exact = PagedRun(load_model(load_model_config(source), source)).logits(TOKENS, WHOLE)
    assert (logits - exact).abs().max().item() > 1e-4


def round_trip(name: str, values: torch.Tensor, kind: Any) -> torch.Tensor:
    """Quantise and dequantise row by row, which no order of rows changes."""
    if name.endswith(".mlp.gate.weight"):
        return values
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind).copy())


def tiny_metadata() -> dict[str, Any]:
    """The tokenizer of zipage-tiny as metadata."""
    source = resolve_model_path(None)
    tokenizer = load_tokenizer(source)
    return {
        "tokenizer.ggml.model": "none",
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 5,
        "tokenizer.huggingface.json": (source / "tokenizer.json").read_text(),
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def test_zipage_tiny_end_to_end(tmp_path: Path) -> None:
    """The embedded model as one GGUF file answers a chat with the same text."""
    path = tmp_path / "tiny.gguf"
    write_gguf(resolve_model_path(None), path, BF16, tiny_metadata())
    message = {
        "role": "user",
        "content": "Add these numbers.\n#1 74\n#2 79\nWhat is the sum (#1-#2)? No checks.",
    }
    params = SamplingParams(temperature=0.0, max_tokens=60)
    options: dict[str, Any] = {"kv_cache_memory": "32MiB", "max_num_seqs": 2}
    answers = []
    # The file itself, and a directory that holds nothing else.
    for model in (None, str(path), str(tmp_path)):
        with LLM(model, **options) as llm:
            assert llm.engine.core.runner.model_config.eos_token_ids == (2, 0)
            answers.append(llm.chat([message], params)[0])
    assert "153" in answers[0].outputs[0].text
    for answer in answers[1:]:
        assert answer.prompt_token_ids == answers[0].prompt_token_ids
        assert answer.outputs[0].text == answers[0].outputs[0].text
        assert answer.outputs[0].token_ids == answers[0].outputs[0].token_ids


def test_fp8_weights_of_a_file(tmp_path: Path) -> None:
    """The weights of a GGUF file are quantised like those of safetensors."""
    source, path = resolve_model_path(None), tmp_path / "tiny.gguf"
    write_gguf(source, path, BF16, tiny_metadata())
    config = load_model_config(source)
    expected = load_model(config, source, quantization="fp8")
    loaded = load_model(load_model_config(path), path, dtype=expected.dtype, quantization="fp8")
    for name, weight in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name).float(), weight.float()), name


def test_byte_level_tokenizer_of_the_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without a copy of tokenizer.json the tokenizer is built from tokens and merges."""
    letters = sorted("abcdefghijklmnopqrstuvwxyzĠ")
    tokens = ["<|endoftext|>", *letters, "th", "the", "Ġthe", "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 2), 3],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.bos_token_id": 0,
    }
    path = tmp_path / "model.gguf"
    source = tmp_path / "source"
    shutil.copytree(checkpoint("qwen2")[0], source)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "bos_token_id": None}))
    write_gguf(source, path, metadata=metadata)
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode("the cat the", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "Ġ", "c", "a", "t", "Ġthe"]
    assert tokenizer.decode(ids) == "the cat the"
    assert load_model_config(path).eos_token_ids == (len(tokens) - 1,)


def test_which_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, _ = checkpoint("qwen3")
    write_gguf(source, tmp_path / "a.gguf")
    assert resolve_model_path(tmp_path) == tmp_path / "a.gguf"
    assert resolve_model_path(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    write_gguf(source, tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files.*a\.gguf, b\.gguf"):
        resolve_model_path(tmp_path)
    shutil.copy(source / "model.safetensors", tmp_path)
    assert resolve_model_path(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="neither a directory nor"):
        resolve_model_path(tmp_path / "c.gguf")


@pytest.mark.parametrize("kept", [0, 3, 100, 0.3, 0.99])
def test_truncated_file(kept: float, checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(checkpoint("qwen3")[0], path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read as GGUF"):
        load_model(load_model_config(path), path)


def test_refused_files(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    source, _ = checkpoint("qwen3")
    write_gguf(source, path, metadata={"split.count": 3})
    with pytest.raises(ModelError, match="one of 3 parts"):
        load_model_config(path)
    write_gguf(source, path, metadata={"qwen3.rope.scaling.type": "spiral"})
    with pytest.raises(ModelError, match=r"scaling\.type 'spiral' is unknown"):
        load_model_config(path)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported are llama, qwen2"):
        load_model_config(path)

    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'zipage\[gguf\]'"):
        load_model_config(path)


def rewrite(
    source: Path,
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    removed: tuple[str, ...] = (),
) -> Path:
    """Copy a GGUF file with metadata replaced or removed and tensors added."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        skipped = name.startswith("GGUF.") or name == "general.architecture"
        if not skipped and name not in metadata and name not in removed:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        *(
            (case, "expert_count", 4, "expert_count 4: models of architecture .* have no experts")
            for case in ("qwen2", "qwen3", "phi3")
        ),
        ("llama", "expert_count", "x", "llama.expert_count.*'x'"),
        ("llama", "attention.layer_norm_rms_epsilon", "x", "rms_norm_eps.*'x'"),
        ("llama", "attention.layer_norm_rms_epsilon", float("nan"), "rms_norm_eps.*nan"),
        ("llama", "attention.layer_norm_rms_epsilon", [1.0], "rms_norm_eps.*1.0"),
        ("llama", "attention.head_count", "x", "llama.attention.head_count.*'x'"),
        ("llama", "attention.head_count", 0, "llama.attention.head_count.*0"),
        ("qwen2", "attention.head_count", 100, "head_dim.*got 0"),
        ("llama", "attention.head_count_kv", [2, 2], "num_key_value_heads"),
        ("llama", "attention.key_length", "x", "llama.attention.key_length.*'x'"),
        ("llama", "embedding_length", "x", "llama.embedding_length.*'x'"),
        ("llama", "rope.dimension_count", "x", "llama.rope.dimension_count.*'x'"),
        ("llama", "rope.freq_base", "x", "rope_theta.*'x'"),
        ("llama", "rope.freq_base", float("inf"), "rope_theta.*inf"),
        ("llama", "rope.scale_linear", "x", "factor.*'x'"),
        ("llama", "rope.scale_linear", float("nan"), "factor.*nan"),
        ("llama", "rope.scaling.type", 3, "scaling.type 3 is unknown"),
        ("llama", "block_count", "x", "num_hidden_layers.*'x'"),
        ("llama", "context_length", "x", "max_position_embeddings.*'x'"),
        ("llama", "feed_forward_length", [1, 2], "intermediate_size"),
        ("llama-yarn-rope", "rope.scaling.original_context_length", "x", "original_max.*'x'"),
        ("llama-yarn-rope", "rope.scaling.factor", float("inf"), "factor.*inf"),
    ],
)
def test_malformed_metadata(
    case: str, key: str, value: Any, message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = tmp_path / "whole.gguf"
    write_gguf(checkpoint(case)[0], source)
    kind = case.split("-")[0]
    path = rewrite(source, tmp_path / "model.gguf", {f"{kind}.{key}": value})
    with pytest.raises(ModelError, match=rf"model\.gguf.*({message})"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scale_linear": 2.5}, RopeParameters("linear", 10000.0, 2.5)),
        ({"scale_linear": 1.0}, RopeParameters()),
        ({"scale_linear": 2.5, "scaling.type": "none"}, RopeParameters()),
        ({"scale_linear": 2.5, "scaling.type": "linear"}, RopeParameters("linear", 1e4, 2.5)),
        ({"scale_linear": 2.5, "scaling.factor": 3.0}, RopeParameters("linear", 1e4, 3.0)),
    ],
)
def test_old_name_of_linear_scaling(
    metadata: dict[str, Any], expected: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = tmp_path / "whole.gguf"
    write_gguf(checkpoint("llama")[0], source)
    named = {f"llama.rope.{key}": value for key, value in metadata.items()}
    assert load_model_config(rewrite(source, tmp_path / "model.gguf", named)).rope == expected


@pytest.mark.parametrize("tensor", ["rope_freqs", "rope_factors_short"])
@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"scaling.type": "linear", "scaling.factor": 2.0}, "rope.scaling.type .linear.*2.0"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0}, "rope.scaling.type .yarn.*2.0"),
        ({"scaling.type": "spiral"}, "rope.scaling.type .spiral"),
        ({"scale_linear": 2.0}, "rope.scale_linear.*2.0"),
    ],
)
def test_scaling_beside_frequencies(
    tensor: str, metadata: dict[str, Any], named: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A file that gives divisors of the frequencies has no other scaling of them."""
    source = tmp_path / "whole.gguf"
    write_gguf(checkpoint("llama")[0], source)
    factors = np.ones(8, dtype=np.float32)
    names = [tensor] if tensor == "rope_freqs" else [tensor, "rope_factors_long"]
    tensors = {f"{name}.weight": factors for name in names}
    path = tmp_path / "model.gguf"
    rewrite(source, path, {f"llama.rope.{key}": value for key, value in metadata.items()}, tensors)
    with pytest.raises(ModelError, match=rf"model\.gguf.*{named}.*{tensor}\.weight"):
        load_model_config(path)
    # Alone they are read.
    assert load_model_config(rewrite(source, path, {}, tensors)).rope.rope_type == "longrope"
    if tensor != "rope_freqs":
        rewrite(source, path, {}, {f"{tensor}.weight": factors})
        with pytest.raises(ModelError, match=r"rope_factors_short\.weight, but not"):
            load_model_config(path)


def test_upper_case_suffix(tmp_path: Path) -> None:
    path = tmp_path / "F.GGUF"
    write_gguf(resolve_model_path(None), path, F32, tiny_metadata())
    assert resolve_model_path(tmp_path) == resolve_model_path(str(path)) == path
    config = read_config(path)
    assert isinstance(config, ModelConfig)
    assert load_model(config, path).num_parameters > 0
    assert len(load_tokenizer(str(path))) == len(load_tokenizer(resolve_model_path(None)))
