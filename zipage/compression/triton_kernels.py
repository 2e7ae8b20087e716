"""The Triton kernels of one KV cache (zipage/kernels/triton) on a CUDA device."""

from __future__ import annotations

import contextlib
import threading

import torch

from zipage.cache.kv_cache import KVCache
from zipage.compression.compactor import block_indices
from zipage.compression.job import CompressionJob
from zipage.compression.scores import NORM_EPS, Reduction
from zipage.kernels.triton import compaction, redundancy, window_attention
from zipage.kernels.triton.launch import UNFUSED, shared_memory

_LOG2E = 1.4426950408889634
# The cache is split into at most this many parts for the attention score (a power of two), each of
# at least this many tokens.
_MAX_PARTS = 16
_MIN_PART = 256
# Longest cache whose order keys one program holds in registers during the selection.
_ONE_TILE = 4096
_PLAN_TILE = 1024
_MOVE_TILE = 64


class _LastTable(threading.local):
    """The block table a thread uploaded last, and for which job and stream."""

    job: CompressionJob | None = None
    stream: int | None = None
    table: torch.Tensor


def _power_of_two(n: int) -> int:
    """The least power of two that is >= n."""
    return 1 << (n - 1).bit_length()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class TritonKernels:
    """Scoring and compaction on the device; results equal the torch reference.

    Calls enqueue work on the current stream and never wait. A job takes a fixed number of launches,
    whatever the number of layers. Scratch, from torch's allocator, is at most about 40 bytes per
    token, layer and KV head. Calls may come from any thread.

    Args:
        cache: a pool of float32, bfloat16 or float16 with head_dim up to 256. On CUDA, or on the
            CPU where Triton interprets its kernels.
    """

    def __init__(self, cache: KVCache) -> None:
        spec = cache.spec
        self._cache = cache
        self._device = spec.device
        self._pairs = spec.num_layers * spec.num_kv_heads
        wide = spec.dtype == torch.float32
        dim_pad = max(16, _power_of_two(spec.head_dim))
        group = spec.num_heads // spec.num_kv_heads
        group_pad = _power_of_two(group)
        # fp32 products run on CUDA cores from registers, so their tiles are small.
        most_rows = 32 if wide else 128
        rows = min(max(most_rows, group_pad), group_pad * _power_of_two(spec.window))
        rows = max(16, rows)
        self._paging = {"KV_HEADS": spec.num_kv_heads, "BLOCK": spec.block_size}
        self._tokens = {**self._paging, "DIM": spec.head_dim, "DIM_PAD": dim_pad}
        self._attention = {
            **self._tokens,
            "QUANTISED": spec.is_quantised,
            "GROUP": group,
            "GROUP_PAD": group_pad,
            "WINDOW": spec.window,
            "ROWS": rows,
            "ROW_CHUNKS": _ceil_div(spec.window, rows // group_pad),
            "TILE": 32 if wide or dim_pad > 128 else 64,
            "num_warps": 8 if rows > 64 else 4,
            **UNFUSED,
        }
        # Split rows are loaded in every step, and several steps are in flight.
        cut = self._attention["ROW_CHUNKS"] > 1
        size = 7 * rows * dim_pad * spec.dtype.itemsize // 2
        serial = wide or (cut and size > shared_memory(spec.device))
        self._score_stages = 1 if serial else 3
        self._columns = 32 if wide else 128
        self._rows = 32
        self._last = _LastTable()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the pool's device current: Triton launches on the current device."""
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()

    def _table(self, job: CompressionJob) -> torch.Tensor:
        """Source blocks, then target blocks, int32, uploaded once per job."""
        stream = (
            torch.cuda.current_stream(self._device).cuda_stream
            if self._device.type == "cuda"
            else None
        )
        last = self._last
        if last.job is not job or last.stream != stream:
            blocks = job.source_blocks + job.target_blocks
            last.table = block_indices(blocks, self._device, torch.int32)
            last.job, last.stream = job, stream
        return last.table

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _scores(self, job: CompressionJob, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        spec = self._cache.spec
        return self._empty(spec.num_layers, spec.num_kv_heads, job.length, dtype=dtype)

    def attention(
        self, job: CompressionJob, scale: float, group: Reduction, window: Reduction
    ) -> torch.Tensor:
        """`scores.window_attention` of the job's queries and keys, ``[L, H, T]``."""
        cache, shape = self._cache, self._attention
        tile, row_chunks = shape["TILE"], shape["ROW_CHUNKS"]
        part = max(_MIN_PART, _ceil_div(_ceil_div(job.length, _MAX_PARTS), tile) * tile)
        num_parts = _ceil_div(job.length, part)
        maxima, sums = self._empty(2, self._pairs * num_parts * row_chunks * shape["ROWS"])
        out = self._scores(job)
        scalars = (
            cache.spec.num_blocks,
            cache.spec.num_query_slots,
            job.query_slot,
            job.length,
            part,
            num_parts,
            scale * _LOG2E,
        )
        table = self._table(job)
        with self._on_device():
            window_attention.window_statistics[(num_parts, row_chunks, self._pairs)](
                cache.queries, cache.kv, cache.kv_scales, table, maxima, sums, *scalars, **shape
            )
            window_attention.window_scores[(num_parts, 1, self._pairs)](
                cache.queries,
                cache.kv,
                cache.kv_scales,
                table,
                maxima,
                sums,
                out,
                *scalars,
                GROUP_MAX=group == "max",
                WINDOW_MAX=window == "max",
                PARTS=_MAX_PARTS,
                num_stages=self._score_stages,
                **shape,
            )
        return out

    def redundancy(
        self, job: CompressionJob, local: bool, tau: float, threshold: float
    ) -> torch.Tensor:
        """`scores.redundancy` of the job's keys, ``[L, H, T]``."""
        cache = self._cache
        scope = cache.spec.block_size if local else job.length
        scopes = _ceil_div(job.length, scope)
        columns = min(self._columns, max(16, _power_of_two(scope)))
        rows = min(self._rows, columns)
        tiles = _ceil_div(scope, columns)
        table = self._table(job)
        sums, values, out = self._scores(job), self._scores(job), self._scores(job)
        newest = self._scores(job, torch.int32)
        scalars = (
            cache.spec.num_blocks,
            job.length,
            job.num_scored,
            job.num_tokens - job.length,
            scope,
            tiles,
        )
        with self._on_device():
            redundancy.similarity_columns[(scopes * tiles, self._pairs)](
                cache.kv,
                cache.positions,
                table,
                sums,
                newest,
                values,
                *scalars,
                threshold,
                NORM_EPS=NORM_EPS,
                QUANTISED=cache.spec.is_quantised,
                COLUMNS=columns,
                ROWS=rows,
                num_warps=8 if columns > 64 else 4,
                **self._tokens,
            )
            redundancy.spared_means[(scopes * tiles, self._pairs)](
                cache.positions,
                table,
                sums,
                newest,
                values,
                out,
                *scalars,
                1.0 / tau,
                TILE=columns,
                COLUMNS=rows,
                num_warps=4,
                **self._paging,
            )
        return out.softmax(-1)

    def value_norms(self, job: CompressionJob) -> torch.Tensor:
        """Norms of the job's values, ``[L, H, T]``."""
        out = self._scores(job)
        table = self._table(job)
        tile = 64
        with self._on_device():
            redundancy.value_norms[(_ceil_div(job.length, tile), self._pairs)](
                self._cache.kv,
                self._cache.kv_scales,
                table,
                out,
                self._cache.spec.num_blocks,
                job.length,
                TILE=tile,
                QUANTISED=self._cache.spec.is_quantised,
                num_warps=4,
                **self._tokens,
            )
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
        """Select and move in two launches, see `CompressionKernels`."""
        cache = self._cache
        blocks = cache.spec.num_blocks
        bits = scores.contiguous().view(torch.int32)
        stored = None if stored is None else stored.contiguous()
        pairs_of_blocks = zip(job.source_blocks, job.target_blocks, strict=False)
        replaced = sum(source != target for source, target in pairs_of_blocks)
        most_movers = job.keep if stable else min(job.length - job.keep, job.keep)
        pairs = most_movers + (0 if stable else replaced * cache.spec.block_size)
        # Two tensors, so that both are aligned and one variant of the kernels is enough.
        sources, targets = (self._empty(self._pairs, pairs, dtype=torch.int32) for _ in range(2))
        counts = self._empty(self._pairs, 2, dtype=torch.int32)
        tensors = (
            cache.scores if stored is None else stored,
            cache.scores,
            cache.positions,
            self._table(job),
            sources,
            targets,
            counts,
        )
        first_position = job.num_tokens - job.length
        num_source = len(job.source_blocks)
        tiles = _ceil_div(pairs, _MOVE_TILE)
        with self._on_device():
            compaction.select_and_plan[(self._pairs,)](
                bits,
                *tensors,
                blocks,
                job.length,
                job.keep,
                job.num_scored,
                first_position,
                protect_below,
                num_source,
                _ceil_div(job.length, _ONE_TILE),
                _ceil_div(job.length, _PLAN_TILE),
                most_movers,
                pairs,
                HAS_STORED=stored is not None,
                PROTECT=protect_below > 0,
                STABLE=stable,
                ONE_TILE=job.length <= _ONE_TILE,
                WINDOW=window,
                TILE=_ONE_TILE,
                PLAN_TILE=_PLAN_TILE,
                num_warps=8,
                **self._paging,
            )
            compaction.move_survivors[(1 if stable else tiles, 2, self._pairs)](
                cache.kv_bits,
                *tensors,
                blocks,
                job.length,
                job.num_scored,
                first_position,
                num_source,
                most_movers,
                pairs,
                tiles if stable else 1,
                HAS_STORED=stored is not None,
                TILE=_MOVE_TILE,
                num_warps=4,
                **self._tokens,
            )
