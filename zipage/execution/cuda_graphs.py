"""CUDA graphs of decode steps at padded batch sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from zipage.attention.backend import StepInputs
from zipage.attention.triton_backend import TritonBackend
from zipage.engine.request import PENDING_TOKEN
from zipage.execution.transfer import to_device
from zipage.kernels.triton.decode_attention import DecodeUnits
from zipage.kernels.triton.prefill_attention import PrefillTiles
from zipage.models.decoder import Decoder


def graph_batch_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: powers of two, then multiples of 8, from 64 on multiples of 16."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 16, 16)]
    return sorted({min(size, largest) for size in sizes})


@dataclass(frozen=True)
class DecodeBatch:
    """The host's inputs of a decode step of S sequences, one new token each.

    Attributes (all ``[S]`` int64): `input_ids`; `positions`, `slot_mapping` and `capture` as in
    `StepInputs`; `cache_lens` with the new token; `rows`, each sequence's row of the block tables.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    capture: np.ndarray
    cache_lens: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class DecodeOutput:
    """What a decode step of S sequences gives; overwritten by the next one.

    Attributes:
        logits: ``[S, V]`` in the model's dtype.
        peaks: ``[S]`` the largest logit of each row, in the same dtype.
        token_ids: ``[S]`` int64, the token with that logit.
    """

    logits: torch.Tensor
    peaks: torch.Tensor
    token_ids: torch.Tensor

    def pick(self, which: slice | torch.Tensor) -> DecodeOutput:
        """The rows of some of the sequences."""
        return DecodeOutput(self.logits[which], self.peaks[which], self.token_ids[which])


class _Inputs:
    """The inputs of all graphs, in one buffer on the device and one pinned on the host.

    A step costs one copy. The attributes are views of the buffers.
    """

    def __init__(self, batch: int, units: int, device: torch.device | None) -> None:
        longs, ints = 4 * batch, 3 * batch + 4 * units + 3
        size = 8 * longs + 4 * ints
        if device is None:
            self.buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        else:
            self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        wide = self.buffer[: 8 * longs].view(torch.int64).view(4, batch)
        self.input_ids, self.positions, self.slot_mapping, self.capture = wide.unbind(0)
        narrow = self.buffer[8 * longs :].view(torch.int32)
        parts = torch.split(narrow, [batch, batch, batch + 1, 4 * units, 1, 1])
        self.cache_lens, self.rows, self.unit_starts, units_, self.num_units, _ = parts
        self.units = units_.view(units, 4)


class DecodeGraphs:
    """Captured forward passes of decode steps, from token ids to logits and their maxima.

    Padding sequences have no cache: they write nothing, and attention gives zero for them.

    Args:
        model: the decoder.
        backend: attention over its cache.
        last_tokens: ``[max_sequences]`` int64 on the device, the last token sampled for the
            sequence of each row of the block tables; replaces a `PENDING_TOKEN`.
        table_width: columns of the block tables.

    Attributes:
        block_tables: ``[max_sequences, table_width]`` int32 on the device; row `DecodeBatch.rows`
            of a sequence holds its blocks.
        capture_seconds, capture_bytes: time and device memory that capturing took.
    """

    def __init__(
        self,
        model: Decoder,
        backend: TritonBackend,
        last_tokens: torch.Tensor,
        table_width: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._last_tokens = last_tokens
        max_sequences = len(last_tokens)
        device = model.device
        self.sizes = graph_batch_sizes(max_sequences)
        units = backend.decode.max_units
        self.block_tables = torch.zeros(
            max_sequences, table_width, dtype=torch.int32, device=device
        )
        # Whatever a graph reads or writes must live as long as the graph, at the same address; all
        # graphs share it, as only one runs at a time.
        self._input_ids = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._used_tables = torch.zeros_like(self.block_tables)
        self._query_start = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)
        # Every sequence's one new token as a tile.
        self._tiles = torch.zeros(max_sequences, 4, dtype=torch.int32, device=device)
        self._tiles[:, :2] = self._query_start[:-1, None]
        self._tiles[:, 3] = 1
        vocab_size = model.config.vocab_size
        self._output = DecodeOutput(
            torch.zeros(max_sequences, vocab_size, dtype=model.dtype, device=device),
            torch.zeros(max_sequences, dtype=model.dtype, device=device),
            torch.zeros(max_sequences, dtype=torch.int64, device=device),
        )
        self._device_inputs = _Inputs(max_sequences, units, device)
        self._host_inputs = [_Inputs(max_sequences, units, None) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.capture_seconds = 0.0
        self.capture_bytes = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, largest first; they share one memory pool."""
        started = time.perf_counter()
        device = self._model.device
        torch.cuda.synchronize(device)
        free_before = torch.cuda.mem_get_info(device)[0]
        inputs = self._device_inputs
        inputs.buffer.zero_()
        inputs.slot_mapping.fill_(-1)
        inputs.capture.fill_(-1)
        pool = None
        # By default torch uses one stream for all engines of the process, on the first's device.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for size in reversed(self.sizes):
            step = self._step(size)
            self._forward(step)  # compiles kernels outside the graph
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Other engines of the process may allocate meanwhile.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self._forward(step)
            pool = graph.pool()
            self._graphs[size] = graph
        torch.cuda.synchronize(device)
        self.capture_bytes = max(0, free_before - torch.cuda.mem_get_info(device)[0])
        self.capture_seconds = time.perf_counter() - started

    def _step(self, size: int) -> StepInputs:
        inputs = self._device_inputs
        step = StepInputs(
            input_ids=self._input_ids[:size],
            positions=inputs.positions[:size],
            slot_mapping=inputs.slot_mapping[:size],
            capture=inputs.capture[:size],
            query_start=self._query_start[: size + 1],
            cache_lens=inputs.cache_lens[:size],
            block_tables=self._used_tables[:size],
            num_tokens=size,
            max_query_len=1,
            max_cache_len=0,
            any_capture=self._backend.cache.spec.num_query_slots > 0,
        )
        if self._backend.batch_invariant:
            self._backend.use_tiles(step, PrefillTiles(self._tiles[:size]))
            return step
        units = DecodeUnits(
            inputs.units, inputs.unit_starts[: size + 1], inputs.num_units, fill=True
        )
        self._backend.use_units(step, units)
        return step

    def _forward(self, step: StepInputs) -> None:
        rows = self._device_inputs.rows[: step.num_tokens]
        torch.index_select(self.block_tables, 0, rows, out=step.block_tables)
        given = self._device_inputs.input_ids[: step.num_tokens]
        last = self._last_tokens.index_select(0, rows)
        torch.where(given == PENDING_TOKEN, last, given, out=step.input_ids)
        output = self._output.pick(slice(step.num_tokens))
        self._model.project(self._model(step, self._backend), out=output.logits)
        torch.max(output.logits, dim=-1, out=(output.peaks, output.token_ids))

    def run(self, batch: DecodeBatch) -> DecodeOutput:
        """Replay the smallest graph that holds the batch, after the work already queued."""
        count = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= count)
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()  # the copy of two steps ago, long done
        host = self._host_inputs[self._turn]
        decoding = np.full(count, not self._backend.batch_invariant)
        units, unit_starts = self._backend.decode.plan(batch.cache_lens, np.arange(count), decoding)
        _fill(host.input_ids, batch.input_ids, size, 0)
        _fill(host.positions, batch.positions, size, 0)
        _fill(host.slot_mapping, batch.slot_mapping, size, -1)
        _fill(host.capture, batch.capture, size, -1)
        _fill(host.cache_lens, batch.cache_lens, size, 0)
        _fill(host.rows, batch.rows, size, 0)
        _fill(host.unit_starts, unit_starts, size + 1, len(units))
        host.units[: len(units)] = torch.from_numpy(units)
        host.num_units[0] = len(units)
        self._device_inputs.buffer.copy_(host.buffer, non_blocking=True)
        self._copied[self._turn].record()
        self._graphs[size].replay()
        return self._output.pick(slice(count))

    def update_tables(self, cells: Mapping[int, int]) -> None:
        """Write block ids into the block tables on the device.

        Args:
            cells: ``row * table_width + column`` to block id.
        """
        if not cells:
            return
        packed = torch.tensor([list(cells), list(cells.values())])
        on_device = to_device(packed, self.block_tables.device)
        self.block_tables.view(-1).index_copy_(0, on_device[0], on_device[1].to(torch.int32))


def _fill(target: torch.Tensor, values: np.ndarray, size: int, padding: int) -> None:
    """Write values and padding into the first `size` entries."""
    into = target.numpy()
    count = len(values)
    into[:count] = values
    into[count:size] = padding
