"""How large the KV pool is."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.config import EngineConfig, host_memory_available, parse_bytes
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory

if TYPE_CHECKING:
    from zipage.models.config import ModelConfig
    from zipage.models.transformers_config import TransformersConfig

#: Without any other word, the pool takes this share of the host's available memory, at most 4 GiB.
_CPU_SHARE, _CPU_MOST = 0.5, 4 << 30
_CUDA_SHARE = 0.9


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one block: keys, values, stored scores and positions of its tokens."""
    return spec.block_size * (spec.bytes_per_token + spec.score_bytes_per_token)


def resolve_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The option `dtype`: on ``auto`` the checkpoint's, but float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else model_dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pool_spec(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCacheSpec:
    """Shape of the pool of a model, without blocks: `plan_pool` gives their number."""
    return KVCacheSpec(
        num_layers=model.num_layers,
        num_blocks=0,
        block_size=config.block_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
        window=config.resolved_window if config.compresses else 0,
        num_query_slots=config.resolved_query_slots,
    )


def plan_pool(
    config: EngineConfig, spec: KVCacheSpec, max_model_len: int, reserved: int = 0
) -> KVCacheSpec:
    """Size the pool of `spec` (whose `num_blocks` is ignored) from the config.

    Args:
        config: says how much memory there is.
        spec: shape of the pool.
        max_model_len: longest text.
        reserved: bytes of device memory that are needed beside the pool.

    Raises:
        ConfigError: the memory is not enough for the query slots and one useful request.
    """
    slots = spec.query_slot_bytes * spec.num_query_slots
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
        source = f"num_kv_blocks={blocks}"
    else:
        total, source = _pool_bytes(config, spec.device, reserved)
        blocks = (total - slots) // block_bytes(spec)
    budget = config.kv_budget if config.compresses else None
    least = config.max_blocks_of(budget) or 1
    least = min(least, -(-max_model_len // config.block_size))
    if blocks < least:
        raise ConfigError(
            f"{source} gives {max(0, blocks)} KV blocks of {block_bytes(spec):,} bytes "
            f"({config.block_size} tokens) after {slots:,} bytes for {spec.num_query_slots} query "
            f"slots; at least {least} are needed for one request "
            f"(kv_budget={budget}, max_model_len={max_model_len}): raise the memory, or lower "
            f"kv_budget, block_size or num_query_slots"
        )
    return replace(spec, num_blocks=blocks)


def make_pool(spec: KVCacheSpec) -> KVCache:
    """Allocate the pool.

    Raises:
        ConfigError: it is larger than the device's memory.
    """
    size = spec.num_blocks * block_bytes(spec) + spec.num_query_slots * spec.query_slot_bytes
    fault = ConfigError(
        f"a KV pool of {spec.num_blocks} blocks and {spec.num_query_slots} query slots takes "
        f"{size:,} bytes, more than {spec.device} has: lower num_kv_blocks, kv_cache_memory or "
        "num_query_slots"
    )
    # Host memory is only taken when it is written, so that the allocation alone tells nothing.
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if spec.device.type == "cpu" and size > physical:
        raise fault
    try:
        return KVCache(spec)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise fault from error


def _pool_bytes(config: EngineConfig, device: torch.device, reserved: int) -> tuple[int, str]:
    if config.kv_cache_memory is not None:
        size = parse_bytes("kv_cache_memory", config.kv_cache_memory)
        return size, f"kv_cache_memory={config.kv_cache_memory}"
    share = config.memory_utilization
    if device.type == "cuda":
        share = _CUDA_SHARE if share is None else share
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - share) * total) - reserved, f"memory_utilization={share}"
    available = host_memory_available()
    if share is None:
        return min(int(_CPU_SHARE * available), _CPU_MOST), "the default share of host memory"
    return int(share * available), f"memory_utilization={share}"
