"""Finding a model's directory and filling a decoder with its weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from zipage.errors import ConfigError, ModelError
from zipage.models.checkpoint import INDEX_FILE, SINGLE_FILE, is_gguf, open_checkpoint
from zipage.models.config import ModelConfig
from zipage.models.decoder import AllReduce, Decoder
from zipage.models.fp8 import FP8, Fp8Matrix
from zipage.models.weight_plan import fill_weights

EMBEDDED_MODEL = "zipage-tiny"

# Prime, so that equal rows of a weight are far apart.
_DUMMY_LENGTH = 4_194_301
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_STRAY_FILES = ["original/*", "consolidated*"]


def resolve_model_path(name_or_path: str | Path | None, revision: str | None = None) -> Path:
    """Find the directory or GGUF file of a model, downloading it if it is a hub id.

    Args:
        name_or_path: a local directory, a GGUF file, a Hugging Face hub id, or None for the model
            inside the package (also called ``zipage-tiny``). A directory whose only weights are
            one GGUF file stands for that file.
        revision: branch, tag or commit of a hub model.

    Raises:
        ModelError: there is no such directory, or the download failed.
    """
    embedded = Path(__file__).parents[1] / "assets" / EMBEDDED_MODEL
    if name_or_path is None:
        return embedded
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        return _only_gguf(local) or local
    if is_gguf(local) and local.is_file():
        return local
    name = str(name_or_path)
    if name == EMBEDDED_MODEL:
        return embedded
    if local.exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ModelError(
            f"model {name!r} is neither a directory nor a Hugging Face hub id nor a GGUF file"
        )

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


def _only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without other weights.

    Raises:
        ModelError: there are several.
    """
    if any((directory / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)):
        return None
    files = sorted(file for file in directory.iterdir() if is_gguf(file))
    if len(files) > 1:
        raise ModelError(
            f"{directory} holds {len(files)} GGUF files: give one of them as the model, "
            f"{', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


def load_model(
    config: ModelConfig,
    path: Path | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    all_reduce: AllReduce | None = None,
    max_positions: int | None = None,
    quantization: str | None = None,
) -> Decoder:
    """Build a decoder and fill it.

    Weights are copied tensor by tensor from memory-mapped files, so that the decoder's copy is the
    only complete one, also in fp8; a tensor-parallel rank reads only its shard.

    Args:
        config: the model.
        path: its directory or GGUF file, see `open_checkpoint`. Not needed for dummy weights.
        dtype: dtype to run in; None for the checkpoint's.
        device: where to run.
        load_format: ``auto``, or ``dummy`` for random weights (normal, standard deviation 0.02,
            repeating after 4 million).
        seed: seed of dummy weights.
        tp_rank, tp_size, all_reduce, max_positions, quantization: see `Decoder`.

    Raises:
        ModelError: files are missing or broken, or tensors are missing, surplus or misshapen.
        ConfigError: `load_format` is unknown, or the model cannot be split over `tp_size` ranks or
            does not support the quantisation.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format {load_format!r} is unknown; use 'auto' or 'dummy'")
    try:
        decoder = Decoder(
            config,
            dtype or config.dtype,
            torch.device(device),
            tp_rank=tp_rank,
            tp_size=tp_size,
            all_reduce=all_reduce,
            max_positions=max_positions,
            quantization=quantization,
        )
    except RuntimeError as error:
        # Torch's messages for a tensor too large for the memory or for 64-bit sizes.
        if not any(words in str(error) for words in ("can't allocate", "overflowed")):
            raise
        raise ModelError(
            f"{path or config.architecture}: the weights of a model of {config.num_layers} layers, "
            f"hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}, "
            f"{config.num_heads} heads and vocab_size {config.vocab_size} do not fit in memory "
            f"({error})"
        ) from error
    if load_format == "dummy":
        _fill_dummy(decoder, seed)
    else:
        if path is None:
            raise ValueError("only dummy weights need no path")
        with open_checkpoint(path) as checkpoint:
            fill_weights(decoder, checkpoint)
    return decoder


def _fill_dummy(decoder: Decoder, seed: int) -> None:
    """Cut all weights from one random sequence: drawing billions of numbers takes minutes."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    length = min(_DUMMY_LENGTH, decoder.num_parameters)
    numbers = torch.empty(length, dtype=decoder.dtype, device=decoder.device)
    numbers.normal_(0.0, 0.02, generator=generator)
    offset = 0
    for name, weight in decoder.named_parameters():
        if name.endswith("norm"):
            weight.data.fill_(1.0)
            continue
        if name.endswith("_scale"):
            continue  # written together with its weight
        target = weight.data
        matrix: torch.Tensor | Fp8Matrix = target
        if target.dtype == FP8:
            _, index, of = name.split(".")
            matrix = decoder.decoder_layers[int(index)].matrix(of.removesuffix("_weight"))
            target = torch.empty(target.shape, dtype=decoder.dtype, device=decoder.device)
        flat = target.view(-1)
        done = 0
        while done < flat.numel():
            count = min(length - offset, flat.numel() - done)
            flat[done : done + count] = numbers[offset : offset + count]
            done += count
            offset = (offset + count) % length
        if matrix is not target:
            matrix.copy_(target)
