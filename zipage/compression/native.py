"""The native CPU kernels of one KV cache (zipage/kernels/native/compression.c)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from zipage.cache.kv_cache import KVCache
from zipage.compression.job import CompressionJob
from zipage.compression.scores import Reduction
from zipage.kernels import native


class _Cache(ctypes.Structure):
    _fields_ = (
        ("kv", c_void_p),
        ("scores", c_void_p),
        ("positions", c_void_p),
        ("queries", c_void_p),
        ("layers", c_int64),
        ("blocks", c_int64),
        ("kv_heads", c_int64),
        ("heads", c_int64),
        ("block_size", c_int64),
        ("dim", c_int64),
        ("slots", c_int64),
        ("window", c_int64),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("source", POINTER(c_int32)),
        ("num_source", c_int64),
        ("length", c_int64),
        ("query_slot", c_int64),
        ("num_scored", c_int64),
        ("first_position", c_int64),
    )


def _block_array(blocks: tuple[int, ...]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(blocks))(*blocks)


class NativeKernels:
    """Scoring and compaction over one fp32 CPU cache; results equal the torch reference.

    Calls release the GIL and share no scratch, so they may run on a worker thread.

    Args:
        cache: the KV pool, with query slots.
        num_threads: threads of a call; None for torch's number in the calling thread. Results do
            not depend on it.

    Raises:
        NativeUnavailable: the kernels cannot be built on this machine.
    """

    def __init__(self, cache: KVCache, num_threads: int | None = None) -> None:
        library = native.load()
        self._num_threads = num_threads
        self._attention = library.zp_comp_attention
        self._attention.argtypes = (
            POINTER(_Cache), POINTER(_Job), c_float, c_int, c_int, c_void_p, c_int,
        )  # fmt: skip
        self._redundancy = library.zp_comp_redundancy
        self._redundancy.argtypes = (
            POINTER(_Cache), POINTER(_Job), c_int, c_float, c_float, c_void_p, c_int,
        )  # fmt: skip
        self._value_norms = library.zp_comp_value_norms
        self._value_norms.argtypes = (POINTER(_Cache), POINTER(_Job), c_void_p, c_int)
        self._compact = library.zp_comp_compact
        self._compact.argtypes = (
            POINTER(_Cache), POINTER(_Job), c_void_p, c_void_p, POINTER(c_int32),
            c_int64, c_int64, c_int32, c_int, c_int,
        )  # fmt: skip
        spec = cache.spec
        self._tensors = cache  # owns the memory behind the pointers
        self._cache = _Cache(
            cache.kv.data_ptr(),
            cache.scores.data_ptr(),
            cache.positions.data_ptr(),
            cache.queries.data_ptr(),
            spec.num_layers,
            spec.num_blocks,
            spec.num_kv_heads,
            spec.num_heads,
            spec.block_size,
            spec.head_dim,
            spec.num_query_slots,
            spec.window,
        )

    @property
    def _threads(self) -> int:
        return torch.get_num_threads() if self._num_threads is None else self._num_threads

    def _job(self, job: CompressionJob) -> _Job:
        source = _block_array(job.source_blocks)
        return _Job(
            source,
            len(job.source_blocks),
            job.length,
            job.query_slot,
            job.num_scored,
            job.num_tokens - job.length,
        )

    def _scores(self, job: CompressionJob) -> torch.Tensor:
        shape = (self._cache.layers, self._cache.kv_heads, job.length)
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    def attention(
        self, job: CompressionJob, scale: float, group: Reduction, window: Reduction
    ) -> torch.Tensor:
        """`scores.window_attention` of the job's queries and keys, ``[L, H, T]``."""
        out = self._scores(job)
        _check(
            self._attention(
                self._cache,
                self._job(job),
                scale,
                group == "max",
                window == "max",
                out.data_ptr(),
                self._threads,
            )
        )
        return out

    def redundancy(
        self, job: CompressionJob, local: bool, tau: float, threshold: float
    ) -> torch.Tensor:
        """`scores.redundancy` of the job's keys, ``[L, H, T]``."""
        out = self._scores(job)
        _check(
            self._redundancy(
                self._cache,
                self._job(job),
                local,
                tau,
                threshold,
                out.data_ptr(),
                self._threads,
            )
        )
        return out

    def value_norms(self, job: CompressionJob) -> torch.Tensor:
        """Norms of the job's values, ``[L, H, T]``."""
        out = self._scores(job)
        _check(self._value_norms(self._cache, self._job(job), out.data_ptr(), self._threads))
        return out

    def select_and_compact(
        self,
        job: CompressionJob,
        scores: torch.Tensor,
        stored: torch.Tensor | None,
        window: int,
        protect_below: int,
        stable: bool,
    ) -> None:
        """Select and move in one pass, see `CompressionKernels`."""
        scores = scores.contiguous()
        stored = None if stored is None else stored.contiguous()
        _check(
            self._compact(
                self._cache,
                self._job(job),
                scores.data_ptr(),
                None if stored is None else stored.data_ptr(),
                _block_array(job.target_blocks),
                len(job.target_blocks),
                window,
                protect_below,
                stable,
                self._threads,
            )
        )


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("native compression kernel: no memory for scratch")
