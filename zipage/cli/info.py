"""`zipage info`: what a model needs, and how many requests fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zipage.cli.options import check_budget_is_used, engine_options, with_options
from zipage.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from zipage.cache.kv_cache import KVCacheSpec
    from zipage.config import EngineConfig
    from zipage.models.config import ModelConfig
    from zipage.models.transformers_config import TransformersConfig

#: Engine options that change what a request needs.
_OPTIONS = (
    "revision",
    "model_impl",
    "dtype",
    "device",
    "load_format",
    "model_shape",
    "quantization",
    "max_model_len",
    "kv_cache_dtype",
    "block_size",
    "kv_cache_memory",
    "kv_budget",
    "compression",
    "window",
    "num_query_slots",
    "num_sinks",
    "max_num_seqs",
)

_POOL_SIZES = ("1GiB", "4GiB", "16GiB", "64GiB")


@with_options("engine", engine_options(only=_OPTIONS))
def info(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Local Hugging Face directory or hub id; zipage-tiny if not given."),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            help="Request length (prompt and answer, in tokens) for which to count how many fit. "
            "May be repeated.",
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Show a model's sizes and how many requests fit the KV pool.

    Reads no weights. Requests are counted with full KV, at the given lengths, and with the
    KV budget, where the length of the answer does not matter. Without --kv-cache-memory, several
    pool sizes are shown.
    """
    from zipage.config import EngineConfig
    from zipage.models.config import shape_model_config
    from zipage.models.implementation import read_config

    check_budget_is_used(ctx, engine)
    config = EngineConfig.from_options({"model": model, **engine})
    model_config: ModelConfig | TransformersConfig
    if config.model_shape is not None:
        model_config = shape_model_config(config.model_shape, config.max_model_len)
    else:
        directory = _config_directory(model, config.revision)
        model_config = read_config(directory, config.model_impl, config.max_model_len)
    facts = describe(config, model_config, lengths)
    if json_output:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(model or config.model_shape or "zipage-tiny", facts)


def describe(
    config: EngineConfig,
    model_config: ModelConfig | TransformersConfig,
    lengths: list[int] | None = None,
) -> dict[str, Any]:
    """Sizes of a model and of its KV cache, and requests that fit, under an engine config.

    Args:
        config: the engine's options.
        model_config: the model.
        lengths: tokens of a request with full KV; None for some powers of two and the longest
            text.

    Returns:
        Names to numbers, in bytes, tokens, blocks and requests. `fits` has an entry for each pool
        size: `full_kv` maps lengths to requests, `with_budget` is a number or None.

    Raises:
        ConfigError: a length or `max_model_len` exceeds the model's length.
    """
    from zipage.execution.memory import block_bytes, pool_spec, resolve_dtype
    from zipage.execution.model_runner import resolve_device
    from zipage.models.implementation import count_weights

    limit = model_config.max_position_embeddings
    longest = config.max_model_len or limit
    if longest > limit:
        raise ConfigError(f"max_model_len={longest} exceeds the {limit} positions of the model")
    for length in lengths or ():
        if not 0 < length <= longest:
            raise ConfigError(f"length={length} must be from 1 to max_model_len={longest}")
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    spec = pool_spec(config, model_config, dtype, device)
    full_spec = dataclasses.replace(spec, window=0, num_query_slots=0)
    parameters, weight_bytes = count_weights(model_config, dtype, config.quantization)
    lengths = sorted(set(lengths or _default_lengths(longest)))
    sizes = _POOL_SIZES if config.kv_cache_memory is None else (config.kv_cache_memory,)
    return {
        "architecture": model_config.architecture,
        "model_impl": model_config.model_impl,
        "layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.intermediate_size,
        "heads": model_config.num_heads,
        "kv_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        "tied_embeddings": model_config.tie_word_embeddings,
        "max_model_len": longest,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": spec.bytes_per_token,
        "block_size": config.block_size,
        "block_bytes_full_kv": block_bytes(full_spec),
        "block_bytes": block_bytes(spec),
        "query_slot_bytes": spec.query_slot_bytes,
        "num_query_slots": spec.num_query_slots,
        "kv_budget": config.kv_budget if config.compresses else None,
        "max_blocks": config.max_blocks_of(config.kv_budget) if config.compresses else None,
        "fits": [_fits(size, config, spec, full_spec, lengths) for size in sizes],
    }


def _default_lengths(longest: int) -> list[int]:
    lengths = [n for n in (1024, 4096, 8192, 16384, 32768, 65536, 131072) if n < longest]
    return [*lengths[-4:], longest]


def _fits(
    size: int | str,
    config: EngineConfig,
    spec: KVCacheSpec,
    full_spec: KVCacheSpec,
    lengths: list[int],
) -> dict[str, Any]:
    from zipage.config import parse_bytes
    from zipage.execution.memory import block_bytes

    pool = parse_bytes("kv_cache_memory", size)
    full_blocks = pool // block_bytes(full_spec)
    # The last token of an answer is never written to the cache.
    full = {n: full_blocks // -(-max(1, n - 1) // config.block_size) for n in lengths}
    with_budget = None
    max_blocks = config.max_blocks_of(config.kv_budget) if config.compresses else None
    if max_blocks is not None:
        slots = spec.num_query_slots * spec.query_slot_bytes
        with_budget = max(0, (pool - slots) // block_bytes(spec)) // max_blocks
    return {"kv_cache_memory": pool, "full_kv": full, "with_budget": with_budget}


def _config_directory(model: str | None, revision: str | None) -> Path:
    """The directory of a model's config.json; nothing else is fetched of a hub model."""
    from zipage.models.loader import EMBEDDED_MODEL, resolve_model_path

    if model is None or model == EMBEDDED_MODEL or Path(model).expanduser().exists():
        return resolve_model_path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        files = ["config.json", "generation_config.json"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except HFValidationError:  # neither: the engine's own message says so
        return resolve_model_path(model)
    except Exception as error:  # the hub client raises errors of several libraries
        raise ModelError(
            f"model {model!r} is not a local directory, and fetching its config.json from the "
            f"Hugging Face hub failed: {type(error).__name__}: {error}"
        ) from error


def _print(name: str, facts: dict[str, Any]) -> None:
    console = Console()
    sizes = Table(title=f"{name}: {facts['architecture']}", show_header=False, title_justify="left")
    sizes.add_column()
    sizes.add_column(justify="right")
    heads = f"{facts['heads']} / {facts['kv_heads']} x {facts['head_dim']}"
    inner = f"{facts['intermediate_size']:,}" if facts["intermediate_size"] else "-"
    rows = {
        "code": f"{facts['model_impl']} (model_impl)",
        "layers": f"{facts['layers']:,}",
        "hidden / intermediate size": f"{facts['hidden_size']:,} / {inner}",
        "query / KV heads x head dim": heads,
        "vocabulary": f"{facts['vocab_size']:,}",
        "longest text (tokens)": f"{facts['max_model_len']:,}",
        "dtype": f"{facts['dtype']} (on {facts['device']})",
        "parameters": f"{facts['parameters']:,}",
        "weights": format_bytes(facts["weight_bytes"]),
        "KV per token": format_bytes(facts["kv_bytes_per_token"]),
        f"block of {facts['block_size']} tokens, full KV": format_bytes(
            facts["block_bytes_full_kv"]
        ),
    }
    if facts["num_query_slots"]:
        rows["... with scores and positions"] = format_bytes(facts["block_bytes"])
        rows["query slot"] = (
            f"{format_bytes(facts['query_slot_bytes'])} (x {facts['num_query_slots']})"
        )
    for label, value in rows.items():
        sizes.add_row(label, value)
    console.print(sizes)

    fits = Table(title="Requests that fit the KV pool", title_justify="left")
    fits.add_column("KV pool", justify="right")
    for length in facts["fits"][0]["full_kv"]:
        fits.add_column(f"full KV,\n{length:,} tokens", justify="right")
    if facts["max_blocks"] is not None:
        fits.add_column(f"budget {facts['kv_budget']:,},\nany answer", justify="right")
    for row in facts["fits"]:
        counts = list(row["full_kv"].values())
        if row["with_budget"] is not None:
            counts.append(row["with_budget"])
        fits.add_row(format_bytes(row["kv_cache_memory"]), *(f"{count:,}" for count in counts))
    console.print(fits)


def format_bytes(size: float) -> str:
    """A size for people, in binary units, such as ``144.0 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
