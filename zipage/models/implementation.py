"""Which code runs a model: the decoder, or transformers' own with paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zipage.errors import ConfigError, ModelError
from zipage.models.checkpoint import is_gguf
from zipage.models.config import ModelConfig, load_model_config, read_json
from zipage.models.config_values import architecture_names
from zipage.models.decoder import Decoder
from zipage.models.fp8 import check_fp8
from zipage.models.import_lock import IMPORT_LOCK
from zipage.models.loader import load_model
from zipage.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from zipage.models.transformers_config import TransformersConfig
    from zipage.models.transformers_model import TransformersModel


def read_config(
    path: Path, model_impl: str = "auto", max_model_len: int | None = None
) -> ModelConfig | TransformersConfig:
    """Read a model directory's configuration for the code that will run it.

    Args:
        path: a Hugging Face model directory, or a GGUF file, which only the decoder runs.
        model_impl: ``zipage`` for the decoder, ``transformers`` for transformers' own code,
            ``auto`` for the decoder if it covers the architecture, else transformers.
        max_model_len: longest text in tokens the model will be run on, if less than its longest.

    Raises:
        ModelError: a file is missing or broken, or that code cannot run the model.
    """
    if is_gguf(path):
        if model_impl == "transformers":
            raise ModelError(
                f"{path}: model_impl='transformers' needs a Hugging Face directory, not a GGUF file"
            )
        return load_model_config(path, max_model_len)
    source = path / "config.json"
    raw = read_json(source)
    try:
        names = architecture_names(raw)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    if model_impl == "zipage" or (
        model_impl == "auto" and any(name in ARCHITECTURES for name in names)
    ):
        return load_model_config(path, max_model_len)
    with IMPORT_LOCK:
        from zipage.models.transformers_config import load_transformers_config

    return load_transformers_config(path, max_model_len)


def count_weights(
    config: ModelConfig | TransformersConfig, dtype: torch.dtype, quantization: str | None = None
) -> tuple[int, int]:
    """Parameters and bytes of a model that need not be loaded; tied weights count once."""
    if not isinstance(config, ModelConfig):
        return config.num_parameters, config.num_parameters * dtype.itemsize
    # On the meta device weights have shapes but no storage.
    meta = torch.device("meta")
    decoder = Decoder(config, dtype, meta, max_positions=1, quantization=quantization)
    return decoder.num_parameters, decoder.weight_bytes


def load_weights(
    config: ModelConfig | TransformersConfig,
    path: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_positions: int | None = None,
    quantization: str | None = None,
) -> Decoder | TransformersModel:
    """Build the model that `config` describes and fill it; see the two loaders.

    Raises:
        ConfigError: the model, device or dtype does not support the quantisation.
    """
    if isinstance(config, ModelConfig):
        if quantization == "fp8":
            check_fp8(device, dtype)
        return load_model(
            config,
            path,
            dtype,
            device,
            load_format,
            seed,
            max_positions=max_positions,
            quantization=quantization,
        )
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} needs the decoder; {config.architecture} runs in "
            f"transformers' own code: leave quantization out"
        )
    with IMPORT_LOCK:
        from zipage.models.transformers_model import load_transformers_model

    return load_transformers_model(config, path, dtype, device, load_format, seed)
