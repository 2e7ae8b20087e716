"""Finding a model's directory and filling a decoder with its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from zipage.errors import ConfigError, ModelError
from zipage.models.config import ModelConfig
from zipage.models.decoder import AllReduce, Decoder

EMBEDDED_MODEL = "zipage-tiny"

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_STRAY_FILES = ["original/*", "consolidated*"]


def resolve_model_path(name_or_path: str | Path | None, revision: str | None = None) -> Path:
    """Find the directory of a model, downloading it if it is a hub id.

    Args:
        name_or_path: a local directory, a Hugging Face hub id, or None for the model inside the
            package (also called ``zipage-tiny``).
        revision: branch, tag or commit of a hub model.

    Raises:
        ModelError: no such directory, or the download failed.
    """
    embedded = Path(__file__).parents[1] / "assets" / EMBEDDED_MODEL
    if name_or_path is None:
        return embedded
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        return local
    name = str(name_or_path)
    if name == EMBEDDED_MODEL:
        return embedded
    if local.exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ModelError(f"model {name!r} is neither a directory nor a Hugging Face hub id")

    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_STRAY_FILES,
            )
        )
    except Exception as error:  # the hub client raises errors of several libraries
        raise ModelError(
            f"model {name!r} is not a local directory, and fetching it from the Hugging Face hub "
            f"failed: {type(error).__name__}: {error}"
        ) from error


def load_model(
    config: ModelConfig,
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    all_reduce: AllReduce | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """Build a decoder and fill it.

    Weights are copied tensor by tensor from memory-mapped files, so that the decoder's own copy
    is the only whole one; a tensor-parallel rank reads its shard alone.

    Args:
        config: the model.
        path: its directory: the files named by model.safetensors.index.json where there is one,
            model.safetensors otherwise. Not read for dummy weights.
        dtype: dtype to run in; None for the checkpoint's.
        device: where to run.
        load_format: ``auto``, or ``dummy`` for random weights (normal, standard deviation 0.02).
        seed: seed of dummy weights.
        tp_rank, tp_size, all_reduce, max_positions: see `Decoder`.

    Raises:
        ModelError: files are missing or broken, or tensors are missing, surplus or misshapen.
        ConfigError: `load_format` is unknown or the model cannot be split over `tp_size` ranks.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format {load_format!r} is unknown; use 'auto' or 'dummy'")
    decoder = Decoder(
        config,
        dtype or config.dtype,
        torch.device(device),
        tp_rank=tp_rank,
        tp_size=tp_size,
        all_reduce=all_reduce,
        max_positions=max_positions,
    )
    if load_format == "dummy":
        _fill_dummy(decoder, seed)
    else:
        _fill_from_files(decoder, path)
    return decoder


@dataclass(frozen=True)
class _Target:
    """Where one tensor of a checkpoint goes.

    Attributes:
        shape: its whole shape.
        destination: part of a weight it is copied into; None if this rank does not need it.
        dim, start: the rank's part of it is ``destination.shape[dim]`` long from `start` on.
    """

    shape: tuple[int, ...]
    destination: torch.Tensor | None
    dim: int = 0
    start: int = 0


def _fill_dummy(decoder: Decoder, seed: int) -> None:
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, weight in decoder.named_parameters():
        if name.endswith("norm"):
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, 0.02, generator=generator)


def _fill_from_files(decoder: Decoder, path: Path) -> None:
    targets = _plan(decoder)
    missing = set(targets)
    surplus: list[str] = []
    misshapen: list[str] = []
    for file, names in _checkpoint_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118  (a file, not a dict)
                    if names is not None and name not in names:
                        continue
                    target = targets.get(name)
                    if target is None:
                        if not _is_tolerated(name, decoder.config):
                            surplus.append(name)
                        continue
                    missing.discard(name)
                    piece = checkpoint.get_slice(name)
                    shape = tuple(piece.get_shape())
                    if shape != target.shape:
                        misshapen.append(f"{name} {list(shape)}, expected {list(target.shape)}")
                        continue
                    if piece.get_dtype() not in _FLOAT_DTYPES:
                        raise ModelError(
                            f"{file}: {name} has dtype {piece.get_dtype()}; "
                            f"only {', '.join(_FLOAT_DTYPES)} can be loaded"
                        )
                    if target.destination is None:
                        continue
                    stop = target.start + target.destination.shape[target.dim]
                    part = slice(target.start, stop)
                    target.destination.copy_(piece[part] if target.dim == 0 else piece[:, part])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read (truncated or damaged?): {error}") from error
    faults = {"missing": sorted(missing), "surplus": surplus, "wrong shape": misshapen}
    found = [f"{fault}: {_abridge(names)}" for fault, names in faults.items() if names]
    if found:
        raise ModelError(f"{path}: the weights do not fit config.json; {'; '.join(found)}")


def _plan(decoder: Decoder) -> dict[str, _Target]:
    """Map every tensor the checkpoint must hold to where it goes."""
    config, rank = decoder.config, decoder.tp_rank
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    q_local, kv_local = decoder.num_heads * head_dim, decoder.num_kv_heads * head_dim
    kv_start = rank * config.num_kv_heads // decoder.tp_size * head_dim
    inner_local = decoder.intermediate_size

    def rows(weight: torch.Tensor, start: int, length: int, total: int, at: int) -> _Target:
        shape = (total, *weight.shape[1:])
        return _Target(shape, weight.data[at : at + length], dim=0, start=start)

    def columns(weight: torch.Tensor, start: int, total: int) -> _Target:
        return _Target((hidden, total), weight.data, dim=1, start=start)

    def whole(weight: torch.Tensor) -> _Target:
        return _Target(tuple(weight.shape), weight.data)

    plan = {
        "model.embed_tokens.weight": whole(decoder.embed_weight),
        "model.norm.weight": whole(decoder.final_norm),
    }
    if not config.tie_word_embeddings:
        plan["lm_head.weight"] = whole(decoder.head_weight)
    for i, layer in enumerate(decoder.decoder_layers):
        base = f"model.layers.{i}."
        plan[base + "input_layernorm.weight"] = whole(layer.input_norm)
        plan[base + "post_attention_layernorm.weight"] = whole(layer.post_norm)
        if layer.q_norm is not None and layer.k_norm is not None:
            plan[base + "self_attn.q_norm.weight"] = whole(layer.q_norm)
            plan[base + "self_attn.k_norm.weight"] = whole(layer.k_norm)
        for kind, qkv, gate_up in (
            ("weight", layer.qkv_weight, layer.gate_up_weight),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            if qkv is not None:
                k_at, v_at = q_local, q_local + kv_local
                attn = base + "self_attn."
                plan[f"{attn}q_proj.{kind}"] = rows(qkv, rank * q_local, q_local, q_rows, 0)
                plan[f"{attn}k_proj.{kind}"] = rows(qkv, kv_start, kv_local, kv_rows, k_at)
                plan[f"{attn}v_proj.{kind}"] = rows(qkv, kv_start, kv_local, kv_rows, v_at)
            if gate_up is not None:
                start, length = rank * inner_local, inner_local
                plan[f"{base}mlp.gate_proj.{kind}"] = rows(gate_up, start, length, inner, 0)
                plan[f"{base}mlp.up_proj.{kind}"] = rows(gate_up, start, length, inner, length)
        plan[base + "self_attn.o_proj.weight"] = columns(layer.o_weight, rank * q_local, q_rows)
        plan[base + "mlp.down_proj.weight"] = columns(layer.down_weight, rank * inner_local, inner)
        if config.o_bias:
            plan[base + "self_attn.o_proj.bias"] = _Target((hidden,), layer.o_bias)
        if config.mlp_bias:
            plan[base + "mlp.down_proj.bias"] = _Target((hidden,), layer.down_bias)
    return plan


def _checkpoint_files(path: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield the weight files of a directory, each with the tensors to take (None for all)."""
    index = path / _INDEX_FILE
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            by_file: dict[str, set[str]] = {}
            for name, file in weight_map.items():
                by_file.setdefault(file, set()).add(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        for file, names in sorted(by_file.items()):
            if not (path / file).is_file():
                raise ModelError(f"{index} names {file}, which is not there")
            yield path / file, names
    elif (path / _SINGLE_FILE).is_file():
        yield path / _SINGLE_FILE, None
    else:
        raise ModelError(
            f"{path} holds neither {_INDEX_FILE} nor {_SINGLE_FILE}; "
            f"weights in other formats must be converted to safetensors first"
        )


def _is_tolerated(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold a tensor the decoder has no use for."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return name.endswith(".rotary_emb.inv_freq")


def _abridge(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
