"""Which kernels score and compact the caches of a pool."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, Protocol, get_args

import torch

from zipage.cache.kv_cache import KVCache
from zipage.cache.quantisation import converts_fp8
from zipage.compression.job import CompressionJob
from zipage.compression.scores import Reduction
from zipage.errors import ConfigError
from zipage.kernels import native

KernelChoice = Literal["auto", "torch", "native", "triton"]
"""``torch`` is the reference and runs anywhere; ``auto`` takes the fastest that fits the pool."""

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_MAX_DIM = 256


class CompressionKernels(Protocol):
    """Scores and compaction of one pool, with the results of the torch reference.

    Letters: L layers, H KV heads, T cached tokens of the job.
    """

    def attention(
        self, job: CompressionJob, scale: float, group: Reduction, window: Reduction
    ) -> torch.Tensor:
        """`scores.window_attention` of the job's queries and keys, ``[L, H, T]`` fp32."""

    def redundancy(
        self, job: CompressionJob, local: bool, tau: float, threshold: float
    ) -> torch.Tensor:
        """`scores.redundancy` of the job's keys, ``[L, H, T]`` fp32."""

    def value_norms(self, job: CompressionJob) -> torch.Tensor:
        """Euclidean norms of the job's values, ``[L, H, T]`` fp32."""

    def select_and_compact(
        self,
        job: CompressionJob,
        scores: torch.Tensor,
        stored: torch.Tensor | None,
        window: int,
        protect_below: int,
        stable: bool,
    ) -> None:
        """`select_tokens`, a compaction plan and `move_tokens`.

        Args:
            job: whose cache.
            scores: ``[L, H, T]`` fp32 final scores.
            stored: ``[L, H, T]`` fp32 scores to store, or None for 0.
            window: last slots that are always kept.
            protect_below: text positions below this are kept as far as they fit.
            stable: keep slot order instead of filling holes.
        """


def _fits_native(cache: KVCache) -> bool:
    spec = cache.spec
    return spec.device.type == "cpu" and spec.dtype == torch.float32 and not spec.is_quantised


def _fits_triton(cache: KVCache) -> bool:
    spec = cache.spec
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (
        (spec.device.type == "cuda" or interpreted)
        and spec.dtype in _TRITON_DTYPES
        and spec.head_dim <= _TRITON_MAX_DIM
        and (spec.device.type != "cuda" or not spec.is_quantised or converts_fp8(spec.device))
    )


def make_kernels(
    cache: KVCache, choice: KernelChoice = "auto", num_threads: int | None = None
) -> CompressionKernels | None:
    """The kernels for a pool; None for the torch reference.

    Args:
        cache: the KV pool, with query slots.
        choice: which kernels; `auto` falls back to the torch reference.
        num_threads: threads of the native kernels; None for torch's number.

    Raises:
        ConfigError: `choice` is unknown, or does not fit the pool or this machine.
        NativeUnavailable: native kernels were requested and cannot be built.
    """
    spec = cache.spec
    if choice not in get_args(KernelChoice):
        raise ConfigError(
            f"compression kernels must be {', '.join(get_args(KernelChoice))}, got {choice!r}"
        )
    if choice == "native" and not _fits_native(cache):
        raise ConfigError(
            "native compression needs device cpu and dtype float32, "
            f"got {spec.device} and {spec.kv_dtype or spec.dtype}"
        )
    has_triton = importlib.util.find_spec("triton") is not None
    if choice == "triton" and not (_fits_triton(cache) and has_triton):
        raise ConfigError(
            "triton compression needs triton, device cuda, dtype float32, bfloat16 or float16, "
            f"and head_dim up to {_TRITON_MAX_DIM}; got {spec.device}, {spec.dtype}, head_dim "
            f"{spec.head_dim}, triton {'installed' if has_triton else 'not installed'}"
        )
    if choice == "auto" and has_triton and spec.device.type == "cuda" and _fits_triton(cache):
        choice = "triton"
    elif choice == "auto" and _fits_native(cache) and native.available():
        choice = "native"
    if choice == "native":
        from zipage.compression.native import NativeKernels

        return NativeKernels(cache, num_threads)
    if choice == "triton":
        from zipage.compression.triton_kernels import TritonKernels

        return TritonKernels(cache)
    return None
