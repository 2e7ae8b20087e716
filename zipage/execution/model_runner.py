"""Runs step plans on the model: batch tensors, forward pass, sampling, swaps, compressions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from zipage.attention.backend import StepInputs, make_backend, padded_rows
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.job import CompressionJob
from zipage.compression.kernels import KernelChoice
from zipage.compression.policies import make_policy
from zipage.compression.retention import kept_positions
from zipage.config import EngineConfig
from zipage.engine.request import PENDING_TOKEN, Request
from zipage.engine.scheduler import ScheduledTokens, StepPlan, SwapMove
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory, release_memory, without_frames
from zipage.execution.logprobs import PromptRows, prompt_logprobs
from zipage.execution.memory import (
    DeviceMemory,
    MemoryPlan,
    device_memory,
    make_pool,
    plan_pool,
    pool_bytes,
    pool_spec,
    resolve_dtype,
    weights_do_not_fit,
)
from zipage.execution.sampler import LaunchedSample, Sampler, SamplerOutput, SamplingState
from zipage.execution.swap import HostSwap
from zipage.execution.transfer import to_device
from zipage.execution.warm_up import measure
from zipage.models.config import ModelConfig, shape_model_config
from zipage.models.decoder import Decoder
from zipage.models.implementation import count_weights, load_weights, read_config
from zipage.models.loader import resolve_model_path

if TYPE_CHECKING:
    from zipage.cache.kv_cache import KVCacheSpec
    from zipage.execution.cuda_graphs import DecodeBatch, DecodeGraphs, DecodeOutput
    from zipage.models.transformers_config import TransformersConfig
    from zipage.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

_NO_WINDOW = 1 << 60


def resolve_device(name: str) -> torch.device:
    """Turn the option `device` into a device.

    Raises:
        ConfigError: CUDA is requested and not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: this machine or torch build has no CUDA; use 'cpu'")
    device = torch.device(name.partition(":")[0])
    if device.type == "cuda":
        # Torch takes the index modulo 256.
        index = int(name.partition(":")[2] or torch.cuda.current_device())
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device={name!r}: there are {torch.cuda.device_count()} devices")
        device = torch.device("cuda", index)
    return device


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the calling thread's current one: kernels, streams and events go there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class ModelRunner:
    """A model, its KV cache and everything that touches their tensors.

    Attributes:
        model_path: the model's directory or GGUF file; None for a `model_shape`.
        model_config: the parsed checkpoint configuration.
        max_model_len: most tokens of prompt and answer.
        memory_plan: how the device's memory is used; None on the CPU.
        cache: the KV pool.
        swap: host copies of swapped requests.
        forward_seconds: time spent in forward passes and sampling so far.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.model_path: Path | None = None
        if config.model_shape is not None:
            self.model_config: ModelConfig | TransformersConfig = shape_model_config(
                config.model_shape, config.max_model_len
            )
        else:
            self.model_path = resolve_model_path(config.model, config.revision)
            self.model_config = read_config(
                self.model_path, config.model_impl, config.max_model_len
            )
        limit = self.model_config.max_position_embeddings
        self.max_model_len = config.max_model_len or limit
        if self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={self.max_model_len} exceeds the {limit} positions of the model"
            )
        if config.batch_invariant:
            _check_batch_invariant(self.model_config, self.device)
        dtype = resolve_dtype(config.dtype, self.model_config.dtype, self.device)
        memory = device_memory(self.device)
        free = 0
        if memory is not None:
            memory.release()
            free = memory.free()
        self.model = self._load_weights(dtype, memory, free)
        mc = self.model_config
        self.sampler = Sampler(config.seed, self.device, config.max_num_seqs)
        width = -(-self.max_model_len // config.block_size) + 1
        self._tables = np.zeros((config.max_num_seqs, width), dtype=np.int32)
        self._ahead = config.schedules_ahead(self.device.type)
        # The last token sampled for the request of each row.
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self.graphs: DecodeGraphs | None = None
        self.memory_plan: MemoryPlan | None = None
        spec = pool_spec(config, mc, dtype, self.device)
        self._kv_scales = self._find_kv_scales(spec, memory)
        if memory is not None:
            self.memory_plan = measure(self, spec, memory, free)
        spec = plan_pool(config, spec, self.max_model_len, self.memory_plan)
        if self.memory_plan is not None:
            self.memory_plan = replace(self.memory_plan, pool=pool_bytes(spec))
            logger.info("memory of %s: %s", self.device, self.memory_plan)
        self._prepare(spec)
        if self.graphs is not None:
            logger.info(
                "captured %d CUDA graphs in %.1f s, %d MiB",
                len(self.graphs.sizes),
                self.graphs.capture_seconds,
                self.graphs.capture_bytes >> 20,
            )
        logger.info(
            "model %s (model_impl %s), %s on %s, %d KV blocks of %d tokens in %s, "
            "attention backend %s",
            self.model_path or config.model_shape,
            mc.model_impl,
            dtype,
            self.device,
            self.cache.spec.num_blocks,
            config.block_size,
            str(self.cache.kv.dtype).removeprefix("torch."),
            self.backend.name,
        )

    def _prepare(self, spec: KVCacheSpec) -> None:
        """Make the KV pool and everything that uses it."""
        try:
            self.make_cache(spec)
            self.use_cache()
            self.capture_graphs()
        except Exception as error:
            if self.memory_plan is None or not is_out_of_memory(error):
                raise
            cause = without_frames(error)
        else:
            return
        raise ConfigError(
            f"{self.device} is out of memory, though the plan fitted: memory was taken meanwhile "
            f"by others, or the KV pool leaves too little: lower its size or memory_utilization "
            f"({self.memory_plan})"
        ) from cause

    def _load_weights(
        self, dtype: torch.dtype, memory: DeviceMemory | None, free: int
    ) -> Decoder | TransformersModel:
        try:
            return load_weights(
                self.model_config,
                self.model_path,
                dtype=dtype,
                device=self.device,
                load_format=self.config.load_format,
                seed=self.config.seed,
                max_positions=self.max_model_len,
                quantization=self.config.quantization,
            )
        except Exception as error:
            if memory is None or not is_out_of_memory(error):
                raise
            cause = without_frames(error)
        parameters, size = count_weights(self.model_config, dtype, self.config.quantization)
        raise weights_do_not_fit(memory, parameters, dtype, size, free) from cause

    def _find_kv_scales(
        self, spec: KVCacheSpec, memory: DeviceMemory | None
    ) -> torch.Tensor | None:
        """Scales of a quantised KV cache; None if the cache is not quantised."""
        if not spec.is_quantised:
            return None
        from zipage.execution.kv_calibration import calibrate, calibration_tokens

        tokenizer = self.config.tokenizer
        if tokenizer is None and self.model_path is not None:
            tokenizer = str(self.model_path)
        vocab_size = self.model_config.vocab_size
        token_ids = calibration_tokens(
            tokenizer, self.config.revision, vocab_size, self.max_model_len
        )
        try:
            return calibrate(self.model, spec, token_ids)
        except Exception as error:
            if memory is None or not is_out_of_memory(error):
                raise
            cause = without_frames(error)
        raise ConfigError(
            f"{self.device} is out of memory before the KV pool is allocated, calibrating scales "
            f"of kv_cache_dtype={self.config.kv_cache_dtype!r} on {len(token_ids)} tokens: use a "
            "smaller model"
        ) from cause

    def make_cache(self, spec: KVCacheSpec) -> None:
        """Allocate the KV pool."""
        self.cache = make_pool(spec)
        if self._kv_scales is not None:
            self.cache.kv_scales.copy_(self._kv_scales)
        self._row_owner: list[Request | None] = [None] * self.config.max_num_seqs
        self._row_version = [-1] * self.config.max_num_seqs
        self._row_blocks = [0] * self.config.max_num_seqs
        # Changes of block tables not yet copied to the device.
        self._stale_cells: dict[int, int] = {}

    def use_cache(self) -> None:
        """Make everything that uses the KV pool."""
        config, scale = self.config, self.model.scale
        self.swap = HostSwap(self.cache)
        self.forward_seconds = 0.0
        self.backend = make_backend(
            config.attention_backend,
            self.cache,
            scale,
            config.max_num_seqs,
            config.batch_invariant,
        )
        if isinstance(self.model, Decoder):
            if self.backend.name == "native":
                self.model.pack()
            elif self.backend.name == "triton":
                self.model.fuse(config.batch_invariant)
        self.compressor: Compressor | None = None
        if config.compresses:
            options = CompressionOptions(
                window=config.resolved_window,
                compaction=config.compaction,
                num_sinks=config.num_sinks,
                protect_prompt=config.protect_prompt,
                seed=config.seed,
            )
            policy = make_policy(config.compression, config.policy_options)
            kernels: KernelChoice = "torch" if config.attention_backend == "torch" else "auto"
            # Next to decoding, more than one thread would take cores that decoding needs.
            threads = 1 if config.compresses_beside(self.device.type) else None
            self.compressor = Compressor(self.cache, policy, options, scale, kernels, threads)

    def drop_cache(self) -> None:
        """Release the KV pool and everything that refers to it."""
        self.graphs = None
        if "swap" in self.__dict__:
            self.swap.close()  # stays, as its length is still read
        for name in ("cache", "backend", "compressor"):
            self.__dict__.pop(name, None)

    def close(self) -> None:
        """Release the weights and the KV pool; no step can run afterwards."""
        self.drop_cache()
        self.__dict__.pop("model", None)
        release_memory(self.device)

    def capture_graphs(self) -> None:
        """Capture decode steps over the KV pool, if graphs support them."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        if isinstance(self.model_config, ModelConfig) and self.model_config.moe is not None:
            return  # which rows an expert computes is decided on the host
        from zipage.attention.triton_backend import TritonBackend
        from zipage.execution.cuda_graphs import DecodeGraphs

        if not isinstance(self.backend, TritonBackend) or not isinstance(self.model, Decoder):
            return  # transformers' code may synchronise with the device, which no graph allows
        width = self._tables.shape[1]
        graphs = DecodeGraphs(self.model, self.backend, self._last_tokens, width)
        graphs.capture()
        self.graphs = graphs

    # ------------------------------------------------------------------ steps

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> SamplerOutput:
        """Compute the tokens of a plan; returns a sampled token for each item that samples."""
        started = time.perf_counter()
        parts = _prompt_rows(plan.scheduled)
        single = not parts and all(item.num_tokens == 1 for item in plan.scheduled)
        if self.graphs is not None and single:
            decoded = self._decode(plan.scheduled, self.graphs)
            best = decoded.peaks, decoded.token_ids
            output = self.sampler.sample(decoded.logits, _states(plan.scheduled), best)
        else:
            step = self._build(plan.scheduled)
            hidden = self.model(step, self.backend)
            read = prompt_logprobs(
                parts, hidden, self.model.compute_logits, self.model_config.vocab_size
            )
            rows = self._sampled_rows(plan.scheduled, step, hidden)
            logits = self.model.compute_logits(rows)
            output = self.sampler.sample(logits, _states(plan.scheduled))
            output.prompt_logprobs = read
        self.forward_seconds += time.perf_counter() - started
        return output

    def can_launch(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Whether `launch` can run these: not if the host must read logits of their prompts."""
        return all(item.request.next_prompt_logits is None for item in scheduled)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, read_tokens: Callable[[], object]) -> LaunchedSample:
        """Queue the work of a plan on the device; its tokens are read later.

        A request whose last known token is `PENDING_TOKEN` takes the token that the previous
        launch sampled for it.

        Args:
            plan: what to compute.
            read_tokens: reads the tokens of the previous launch. It is called once the forward
                pass is queued, if the form of an answer restricts its next token; meanwhile the
                device computes for all requests.
        """
        started = time.perf_counter()
        scheduled = plan.scheduled
        requests = [item.request for item in scheduled if item.samples]
        rows = self._index([request.row for request in requests])
        best = None
        if self.graphs is not None and all(item.num_tokens == 1 for item in scheduled):
            decoded = self._decode(scheduled, self.graphs)
            logits, best = decoded.logits, (decoded.peaks, decoded.token_ids)
        else:
            step = self._build(scheduled)
            hidden = self.model(step, self.backend)
            logits = self.model.compute_logits(self._sampled_rows(scheduled, step, hidden))
        states = _states(scheduled)
        unread = [request.token_ids[-1] == PENDING_TOKEN for request in requests]
        if any(state.form and late for state, late in zip(states, unread, strict=True)):
            read_tokens()
            unread = [False] * len(requests)
        last = self._last_tokens[rows] if any(unread) else None
        launched = self.sampler.launch(logits, states, best, unread, last)
        self._last_tokens.index_copy_(0, rows, launched.token_ids)
        self.forward_seconds += time.perf_counter() - started
        return launched

    def _decode(self, scheduled: Sequence[ScheduledTokens], graphs: DecodeGraphs) -> DecodeOutput:
        """Replay a captured graph; every item has one token. Returns only items that sample."""
        output = graphs.run(self._decode_batch(scheduled, graphs))
        picked = [i for i, item in enumerate(scheduled) if item.samples]
        return output if len(picked) == len(scheduled) else output.pick(self._index(picked))

    def _index(self, rows: list[int]) -> torch.Tensor:
        return self._tensor(np.array(rows, dtype=np.int64))

    def _decode_batch(
        self, scheduled: Sequence[ScheduledTokens], graphs: DecodeGraphs
    ) -> DecodeBatch:
        b, w = self.config.block_size, self.cache.spec.window
        columns = np.empty((6, len(scheduled)), dtype=np.int64)
        for i, item in enumerate(scheduled):
            r = item.request
            self._sync_row(r)
            start, slot = r.num_computed, r.query_slot
            captured = -1
            if slot is not None and r.trigger is not None and r.length >= r.trigger - w:
                captured = slot * w + r.length - (r.trigger - w)
            columns[:, i] = (r.token_ids[start], start, r.length, captured, r.length + 1, r.row)
        from zipage.execution.cuda_graphs import DecodeBatch

        graphs.update_tables(self._stale_cells)
        self._stale_cells.clear()
        ids, positions, lengths, capture, cache_lens, rows = columns
        slots = self._tables[rows, lengths // b].astype(np.int64) * b + lengths % b
        return DecodeBatch(ids, positions, slots, capture, cache_lens, rows)

    def _sampled_rows(
        self, scheduled: Sequence[ScheduledTokens], step: StepInputs, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of the last token of each item that samples."""
        picked = [i for i, item in enumerate(scheduled) if item.samples]
        if len(picked) == step.num_tokens:
            return hidden[: step.num_tokens]
        last = step.query_start[1:].long() - 1
        if len(picked) != len(scheduled):
            last = last[self._index(picked)]
        return hidden[last]

    def _build(self, scheduled: Sequence[ScheduledTokens]) -> StepInputs:
        """Batch tensors of a step. Per-token work is vectorised; Python loops over requests."""
        count = len(scheduled)
        b, w = self.config.block_size, self.cache.spec.window
        token_ids: list[int] = []
        columns = np.empty((6, count), dtype=np.int64)
        for i, item in enumerate(scheduled):
            r, n = item.request, item.num_tokens
            self._sync_row(r)
            start = r.num_computed
            if n == 1:
                token_ids.append(r.token_ids[start])
            else:
                token_ids += r.token_ids[start : start + n]
            slot = r.query_slot
            if slot is None or r.trigger is None:
                columns[:, i] = (n, start, r.length, r.row, _NO_WINDOW, 0)
            else:
                columns[:, i] = (n, start, r.length, r.row, r.trigger - w, slot * w)
        counts, starts, lengths, rows, window_starts, captures = columns
        total = len(token_ids)
        padded = padded_rows(total)
        query_start = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        cache_lens = (lengths + counts).astype(np.int32)
        longest = int(cache_lens.max())
        if total == count:
            positions, slots, row_of = starts, lengths, rows
            window_of, capture_of = window_starts, captures
        else:
            offset = np.arange(total) - np.repeat(query_start[:-1].astype(np.int64), counts)
            positions = np.repeat(starts, counts) + offset
            slots = np.repeat(lengths, counts) + offset
            row_of = np.repeat(rows, counts)
            window_of = np.repeat(window_starts, counts)
            capture_of = np.repeat(captures, counts)
        mapping = self._tables[row_of, slots // b].astype(np.int64) * b + slots % b
        capture = np.where(slots >= window_of, capture_of + slots - window_of, -1)
        tables = self._tables[rows, : -(-longest // b)]
        host_ids = np.asarray(token_ids, dtype=np.int64)
        input_ids = self._tensor(host_ids, padded, 0)
        if self._ahead and (host_ids == PENDING_TOKEN).any():
            known = self._last_tokens[self._tensor(row_of.astype(np.int64), padded, 0)]
            input_ids = torch.where(input_ids == PENDING_TOKEN, known, input_ids)
        return StepInputs(
            input_ids=input_ids,
            positions=self._tensor(positions, padded, 0),
            slot_mapping=self._tensor(mapping, padded, -1),
            capture=self._tensor(capture, padded, -1),
            query_start=self._tensor(query_start),
            cache_lens=self._tensor(cache_lens),
            block_tables=self._tensor(tables),
            num_tokens=total,
            max_query_len=int(counts.max()),
            max_cache_len=longest,
            any_capture=bool((capture >= 0).any()),
            query_start_host=query_start,
            cache_lens_host=cache_lens,
        )

    def _tensor(self, values: np.ndarray, padded: int | None = None, fill: int = 0) -> torch.Tensor:
        if padded is not None and padded != len(values):
            values = np.concatenate(
                (values, np.full(padded - len(values), fill, dtype=values.dtype))
            )
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.device)

    def _sync_row(self, request: Request) -> None:
        """Bring the request's row of the block tables up to date."""
        row, blocks = request.row, request.block_ids
        if self._row_owner[row] is request and self._row_version[row] == request.table_version:
            known = self._row_blocks[row]
            if known == len(blocks):
                return
        else:
            self._row_owner[row] = request
            self._row_version[row] = request.table_version
            known = 0
        self._tables[row, known : len(blocks)] = blocks[known:]
        if self.graphs is not None:
            first = row * self._tables.shape[1]
            self._stale_cells.update(enumerate(blocks[known:], first + known))
        self._row_blocks[row] = len(blocks)

    # ------------------------------------------------------------------ cache moves

    @torch.inference_mode()
    def compress(self, job: CompressionJob) -> torch.Tensor | None:
        """Carry out one compression. May run on another thread or stream than the steps.

        Returns the positions it kept if the job requests them, see `kept_positions`.
        """
        assert self.compressor is not None
        self.compressor.run(job)
        if not job.report_kept:
            return None
        beside = self.config.compresses_beside(self.device.type)
        return kept_positions(self.cache, job, wait=not beside)

    @torch.inference_mode()
    def swap_out(self, move: SwapMove) -> None:
        """Save the cache of a preempted compressed request in host memory."""
        self.swap.swap_out(move.request.request_id, move.block_ids, move.query_slot)

    @torch.inference_mode()
    def swap_in(self, move: SwapMove) -> None:
        """Restore a saved cache."""
        self.swap.swap_in(move.request.request_id, move.block_ids, move.query_slot)


def _check_batch_invariant(
    model_config: ModelConfig | TransformersConfig, device: torch.device
) -> None:
    """Refuse models in which a row's result depends on other rows.

    Raises:
        ConfigError: transformers' own code runs the model, or it has experts and runs on CUDA.
    """
    if not isinstance(model_config, ModelConfig):
        reason = "transformers' own code runs it"
    elif model_config.moe is not None and device.type == "cuda":
        reason = "experts multiply as many rows at once as there happen to be"
    else:
        return
    raise ConfigError(
        f"batch_invariant=True does not run {model_config.architecture} on {device}: {reason}"
    )


def _states(scheduled: Sequence[ScheduledTokens]) -> list[SamplingState]:
    return [item.request.payload.sampling for item in scheduled if item.samples]


def _prompt_rows(scheduled: Sequence[ScheduledTokens]) -> list[PromptRows]:
    """Rows of a step whose logits are needed for prompt log-probabilities."""
    parts: list[PromptRows] = []
    row = 0
    for item in scheduled:
        request = item.request
        wanted, start = request.next_prompt_logits, request.num_computed
        if wanted is not None:
            assert start <= wanted, f"{request.request_id}: prompt logits skipped"
            # After a preemption, positions that were read before are computed once more.
            end = min(start + item.num_tokens, request.prompt_len - 1)
            if wanted < end:
                tokens = request.token_ids[wanted + 1 : end + 1]
                top = request.payload.params.prompt_logprobs
                first_row = row + wanted - start
                parts.append(PromptRows(request.request_id, first_row, wanted, tokens, top))
        row += item.num_tokens
    return parts
