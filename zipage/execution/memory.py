"""How the device's memory is used, and how large the KV pool is."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import KV_DTYPES
from zipage.config import EngineConfig, host_memory_available, parse_bytes
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory

if TYPE_CHECKING:
    from zipage.models.config import ModelConfig
    from zipage.models.transformers_config import TransformersConfig

#: By default the pool takes this share of the host's available memory, at most 4 GiB.
_CPU_SHARE, _CPU_MOST = 0.5, 4 << 30
_CUDA_SHARE = 0.9
#: Share of a CUDA device kept free of the pool, however little is free: allocators waste some.
_CUDA_SPARE = 0.02


class DeviceMemory:
    """Memory of a CUDA device as the driver counts it, for all processes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def total(self) -> int:
        """Total bytes of the device."""
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        """Free bytes, once all queued work is done."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self) -> None:
        """Return memory this process has cached, after collecting garbage."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory to plan; None for host memory, which is committed only as it is written."""
    return DeviceMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class MemoryPlan:
    """How a device's memory is used. All in bytes, and except for `pool` measured before serving.

    Attributes:
        total: of the device.
        free: before the weights were loaded; the rest belongs to other processes, or to this
            process's CUDA context.
        weights: the model.
        steps: the largest steps: activations, logits, workspaces of attention and sampling, and
            kernel code.
        compression: scratch of the largest compression.
        graphs: captured decode steps with their inputs and outputs.
        pool: KV blocks with their stored scores and positions, and query slots.
    """

    total: int
    free: int
    weights: int = 0
    steps: int = 0
    compression: int = 0
    graphs: int = 0
    pool: int = 0

    @property
    def left(self) -> int:
        """Free bytes that are not planned for anything."""
        return self.free - self.weights - self.steps - self.compression - self.graphs - self.pool

    def __str__(self) -> str:
        pool = f", KV pool {_gib(self.pool)}" if self.pool else ""
        return (
            f"total {_gib(self.total)}, free before loading {_gib(self.free)}, weights "
            f"{_gib(self.weights)}, largest steps {_gib(self.steps)}, compression "
            f"{_gib(self.compression)}, CUDA graphs {_gib(self.graphs)}{pool}"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one block: keys, values, stored scores and positions of its tokens."""
    return spec.block_size * (spec.bytes_per_token + spec.score_bytes_per_token)


def resolve_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve the option `dtype`: ``auto`` is the checkpoint's, but float32 on the CPU."""
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
    """Shape of a model's pool without the number of blocks, which `plan_pool` sets."""
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
        kv_dtype=KV_DTYPES[config.kv_cache_dtype],
    )


def plan_pool(
    config: EngineConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    measured: MemoryPlan | None = None,
) -> KVCacheSpec:
    """Size the pool of `spec` (whose `num_blocks` is ignored) from the config.

    Args:
        config: sets how much memory to use.
        spec: shape of the pool.
        max_model_len: longest text.
        measured: memory needed besides the pool; None on the CPU.

    Raises:
        ConfigError: the memory is not enough for the query slots and one useful request, or for a
            pool of the requested size.
    """
    slots = spec.query_slot_bytes * spec.num_query_slots
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
        source = f"num_kv_blocks={blocks}"
    else:
        total, source = _pool_bytes(config, measured)
        blocks = (total - slots) // block_bytes(spec)
    budget = config.kv_budget if config.compresses else None
    least = config.max_blocks_of(budget) or 1
    least = min(least, -(-max_model_len // config.block_size))
    if blocks < least:
        if config.num_kv_blocks is not None:
            raise ConfigError(
                f"{source} is too few: one request needs at least {least} blocks of "
                f"{config.block_size} tokens (kv_budget={budget}, max_model_len={max_model_len}): "
                f"raise it, or lower kv_budget"
            )
        raise ConfigError(
            f"{source} gives {max(0, blocks)} KV blocks of {block_bytes(spec):,} bytes "
            f"({config.block_size} tokens) after {slots:,} bytes for {spec.num_query_slots} query "
            f"slots; at least {least} are needed for one request "
            f"(kv_budget={budget}, max_model_len={max_model_len}): raise the memory, or lower "
            f"kv_budget, block_size or num_query_slots{_advice(config, spec, measured)}"
        )
    spec = replace(spec, num_blocks=blocks)
    if measured is not None and pool_bytes(spec) > measured.left:
        raise ConfigError(
            f"{source}: a KV pool of {_gib(pool_bytes(spec))} ({blocks} blocks and "
            f"{spec.num_query_slots} query slots) is more than the {_gib(max(0, measured.left))} "
            f"left: lower {source.partition('=')[0]}{_advice(config, spec, measured)}"
        )
    return spec


def _advice(config: EngineConfig, spec: KVCacheSpec, measured: MemoryPlan | None) -> str:
    """Advice: what else takes memory, and which options control it."""
    if measured is None:
        return ""
    graphs = "" if config.enforce_eager else ", or set enforce_eager=True"
    return (
        f", max_num_batched_tokens={config.max_num_batched_tokens} or "
        f"max_num_seqs={config.max_num_seqs}{graphs} ({spec.device}: {measured})"
    )


def weights_do_not_fit(
    memory: DeviceMemory, parameters: int, dtype: torch.dtype, size: int, free: int
) -> ConfigError:
    """The error for a model too large to load.

    Args:
        memory: the device's memory.
        parameters: number of the model's parameters.
        dtype: dtype of its weights other than those in fp8.
        size: bytes of its weights.
        free: bytes that were free before.
    """
    return ConfigError(
        f"the weights ({parameters:,} parameters in {str(dtype).removeprefix('torch.')}, "
        f"{_gib(size)}) do not fit on {memory.device}: "
        f"{_gib(free)} of {_gib(memory.total)} were free: take a smaller model or "
        f"dtype, a larger device, or stop what else uses this one"
    )


def pool_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a pool with its score store and query slots, as `kv_cache_memory` counts them."""
    return spec.num_blocks * block_bytes(spec) + spec.num_query_slots * spec.query_slot_bytes


def make_pool(spec: KVCacheSpec) -> KVCache:
    """Allocate the pool.

    Raises:
        ConfigError: it is larger than the device's memory.
    """
    size = pool_bytes(spec)
    fault = ConfigError(
        f"a KV pool of {spec.num_blocks} blocks and {spec.num_query_slots} query slots takes "
        f"{size:,} bytes, more than {spec.device} has: lower num_kv_blocks, kv_cache_memory or "
        "num_query_slots"
    )
    # Host memory is only committed when it is written, so the allocation alone proves nothing.
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if spec.device.type == "cpu" and size > physical:
        raise fault
    try:
        return KVCache(spec)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise fault from error


def _pool_bytes(config: EngineConfig, measured: MemoryPlan | None) -> tuple[int, str]:
    if config.kv_cache_memory is not None:
        size = parse_bytes("kv_cache_memory", config.kv_cache_memory)
        return size, f"kv_cache_memory={config.kv_cache_memory}"
    share = config.memory_utilization
    if measured is not None:
        share = _CUDA_SHARE if share is None else share
        # The share counts this engine alone, as far as other processes leave it free.
        most = min(int(share * measured.total), measured.free - int(_CUDA_SPARE * measured.total))
        return measured.left - measured.free + most, f"memory_utilization={share}"
    available = host_memory_available()
    if share is None:
        return min(int(_CPU_SHARE * available), _CPU_MOST), "the default share of host memory"
    return int(share * available), f"memory_utilization={share}"
