"""Finding models, reading checkpoints, and refusing broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from zipage.errors import ConfigError, ModelError
from zipage.models.config import ModelConfig, load_model_config
from zipage.models.decoder import Decoder
from zipage.models.loader import load_model, resolve_model_path

from .paged_run import PagedRun

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def broken(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """Copy a checkpoint with its tensors changed."""

    def build(case: str, change: Callable[[Tensors], object]) -> Path:
        source, _ = checkpoint(case)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(source / "config.json", tmp_path)
        return tmp_path

    return build


def load(path: Path) -> Decoder:
    return load_model(load_model_config(path), path)


def weights(decoder: Decoder) -> Tensors:
    return dict(decoder.named_parameters())


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def test_resolve_embedded() -> None:
    path = resolve_model_path(None)
    assert (path / "model.safetensors").is_file()
    assert resolve_model_path("zipage-tiny") == path


def test_resolve_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_path(tmp_path) == tmp_path
    assert resolve_model_path(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "some-model").mkdir()
    assert resolve_model_path("~/some-model") == tmp_path / "some-model"
    (tmp_path / "zipage-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("zipage-tiny").resolve() == tmp_path / "zipage-tiny"


@pytest.mark.parametrize("name", ["./no-such-model", "/no/such/model", "a/b/c", "", "x y"])
def test_resolve_no_such_directory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    if name == "":
        assert resolve_model_path(name) == Path()  # the current directory
        return
    with pytest.raises(ModelError, match="neither a directory nor a Hugging Face hub id"):
        resolve_model_path(name)


def test_resolve_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def download(name: str, *, revision: str | None, **_: object) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("org/some-model.v1", "main") == tmp_path
    assert asked == [("org/some-model.v1", "main")]

    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=r"org/some-model.*hub failed.*no route to host"):
        resolve_model_path("org/some-model")


def test_fused_rows(checkpoint: Checkpoint) -> None:
    path, model = checkpoint("qwen2")
    decoder = load(path)
    state = model.state_dict()
    for i, layer in enumerate(decoder.decoder_layers):
        base = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [state[f"{base}self_attn.{p}_proj.{kind}"] for p in "qkv"]
            assert torch.equal(getattr(layer, f"qkv_{kind}"), torch.cat(parts))
        parts = [state[f"{base}mlp.{p}_proj.weight"] for p in ("gate", "up")]
        assert torch.equal(layer.gate_up_weight, torch.cat(parts))
    assert torch.equal(decoder.head_weight, state["lm_head.weight"])


def test_tied_head_is_the_embedding(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("llama-tied")[0])
    assert decoder.head_weight is decoder.embed_weight
    assert "head_weight" not in weights(decoder)


def test_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, model = checkpoint("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(file.name for file in tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_equal_weights(load(tmp_path), load(path))

    (tmp_path / shards[1]).rename(tmp_path / "moved.safetensors")
    with pytest.raises(ModelError, match=f"names {shards[1]}, which is not there"):
        load(tmp_path)
    (tmp_path / "moved.safetensors").rename(tmp_path / shards[1])
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load(tmp_path)


def test_stray_files_are_ignored(checkpoint: Checkpoint, broken: Callable[..., Path]) -> None:
    path = broken("llama", lambda tensors: None)
    save_file({"stray": torch.zeros(1)}, path / "adapter.safetensors")
    assert_equal_weights(load(path), load(checkpoint("llama")[0]))


def test_missing_surplus_and_misshapen_tensors(broken: Callable[..., Path]) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(63)

    with pytest.raises(ModelError) as caught:
        load(broken("llama", spoil))
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "surplus: model.layers.7.mlp.up_proj.weight;" in message
    assert "wrong shape: model.norm.weight [63], expected [64]" in message


def test_untied_head_must_be_there(broken: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load(broken("qwen2", lambda tensors: tensors.pop("lm_head.weight")))


def test_bias_the_config_does_not_name(broken: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    with pytest.raises(ModelError, match=r"surplus: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(broken("llama", add))


def test_tolerated_surplus(broken: Callable[..., Path], checkpoint: Checkpoint) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert_equal_weights(load(broken("llama-tied", add)), load(checkpoint("llama-tied")[0]))


def test_quantised_tensor(broken: Callable[..., Path]) -> None:
    def quantise(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)

    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype I8"):
        load(broken("llama", quantise))


@pytest.mark.parametrize("kept", [0, 5, 200, 0.5, 0.999])
def test_truncated_file(kept: float, broken: Callable[..., Path]) -> None:
    path = broken("llama", lambda tensors: None)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(path)


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_fused_experts(case: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The two tensors per layer that transformers 5 can write give what one per expert gives."""
    path, _ = checkpoint(case)
    moe = load_model_config(path).moe
    assert moe is not None
    names = moe.names
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        base = f"model.layers.{layer}."

        def stacked(part: str, base: str = base) -> torch.Tensor:
            return torch.stack(
                [
                    tensors.pop(f"{base}{names.block}.experts.{expert}.{part}.weight")
                    for expert in range(moe.num_experts)
                ]
            )

        router = tensors.pop(f"{base}{names.block}.gate.weight")
        fused = torch.cat([stacked(names.gate), stacked(names.up)], dim=1)
        tensors[f"{base}mlp.gate.weight"] = router
        tensors[f"{base}mlp.experts.gate_up_proj"] = fused
        tensors[f"{base}mlp.experts.down_proj"] = stacked(names.down)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(path / "config.json", tmp_path)
    assert_equal_weights(load(tmp_path), load(path))


def test_missing_expert(broken: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    with pytest.raises(ModelError, match=f"missing: {name}"):
        load(broken("qwen3-moe", lambda tensors: tensors.pop(name)))


def test_fused_projections_of_a_wrong_shape(broken: Callable[..., Path]) -> None:
    def cut(tensors: Tensors) -> None:
        name = "model.layers.2.self_attn.qkv_proj.weight"
        tensors[name] = tensors[name][:-1].clone()

    message = r"wrong shape: model\.layers\.2\.self_attn\.qkv_proj\.weight \[127, 64\]"
    with pytest.raises(ModelError, match=message):
        load(broken("phi3", cut))


def test_wrong_weights_beside_the_right_ones(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Neither beside an index nor beside model.safetensors is any other weight file read."""
    path, model = checkpoint("qwen2")
    expected = load(path)
    wrong = {name: weight + 1 for name, weight in load_file(path / "model.safetensors").items()}
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    shutil.copytree(path, single)
    model.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    save_file(wrong, sharded / "model.safetensors")
    for directory in (single, sharded):
        save_file(wrong, directory / "consolidated.safetensors")
        save_file({"lora": torch.zeros(1)}, directory / "adapter_model.safetensors")
        (directory / "model-00009-of-00009.safetensors").write_bytes(b"left over")
        (directory / "pytorch_model.bin").write_bytes(b"left over")
        assert_equal_weights(load(directory), expected)


def test_pickled_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = load_model_config(checkpoint("llama")[0])
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model-00001-of-00002\.bin is a pickle.*convert"):
        load_model(config, tmp_path)


def test_no_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = load_model_config(checkpoint("llama")[0])
    (tmp_path / "weights.pth").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds neither.*converted to safetensors"):
        load_model(config, tmp_path)


def test_dummy_weights(tmp_path: Path, checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint("qwen3-tied-biases")[0])

    def dummy(config: ModelConfig, seed: int) -> Decoder:
        return load_model(config, tmp_path, load_format="dummy", seed=seed)

    first = dummy(config, 1)
    assert_equal_weights(first, dummy(config, 1))
    assert not torch.equal(first.embed_weight, dummy(config, 2).embed_weight)
    layer = first.decoder_layers[0]
    assert layer.q_norm is not None
    assert torch.equal(layer.q_norm, torch.ones(16))
    assert 0.018 < first.embed_weight.std().item() < 0.022
    logits = PagedRun(first).logits([1, 2, 3], [3])
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_unknown_load_format(tmp_path: Path, checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint("llama")[0])
    with pytest.raises(ConfigError, match="load_format 'gguf' is unknown; use 'auto' or 'dummy'"):
        load_model(config, tmp_path, load_format="gguf")
