"""Executes compression jobs: score, select, move."""

from __future__ import annotations

from dataclasses import dataclass

from zipage.cache.kv_cache import KVCache
from zipage.compression.compactor import move_tokens, plan_holes, plan_stable
from zipage.compression.job import CompressionJob
from zipage.compression.kernels import KernelChoice, make_kernels
from zipage.compression.policies.base import Policy
from zipage.compression.select import select_tokens
from zipage.compression.view import CacheView
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory, release_memory

#: Most scratch bytes of a job, unless a single layer needs more: work is split by layers.
SCRATCH_BYTES = 256 << 20
#: Scratch bytes per token, layer and KV head: scores and their parts.
_SCRATCH_OF_TOKEN = 40


@dataclass(frozen=True)
class CompressionOptions:
    """Options common to all policies.

    Attributes:
        window: w, number of last tokens of the cache, which are never evicted.
        compaction: ``"stable"`` keeps the survivors in order, ``"holes"`` moves only those whose
            block is released; the kept set is the same.
        num_sinks: text positions below this are never evicted.
        protect_prompt: protect the whole prompt like the window if it takes up at most this
            fraction of the kept tokens; 0 is off.
        seed: seed of policies that draw at random.

    Raises:
        ConfigError: a value is out of range.
    """

    window: int = 16
    compaction: str = "holes"
    num_sinks: int = 0
    protect_prompt: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"window must be at least 1 token, got {self.window}")
        if self.compaction not in ("stable", "holes"):
            raise ConfigError(f"compaction must be 'stable' or 'holes', got {self.compaction!r}")
        if self.num_sinks < 0:
            raise ConfigError(f"num_sinks must be 0 or more, got {self.num_sinks}")
        if not 0.0 <= self.protect_prompt <= 1.0:
            raise ConfigError(
                f"protect_prompt must be a fraction from 0 (off) to 1, got {self.protect_prompt}"
            )


class Compressor:
    """Compresses the caches of requests in one KV pool.

    `run` may be called from any thread, concurrently with decoding on other blocks and with runs
    of other jobs. On CUDA it only enqueues work on the current stream. Its scratch is at most about
    `SCRATCH_BYTES`, or that of one layer if that is more.

    Args:
        cache: the KV pool, with query slots.
        policy: scores the tokens.
        options: options common to all policies.
        scale: factor of the attention logits, usually ``1/sqrt(head_dim)``.
        kernels: which kernels; ``auto`` is native on the CPU for fp32 where they can be built,
            Triton on CUDA, else torch.
        num_threads: threads of the native kernels; None for torch's number.

    Raises:
        ConfigError: the options or the requested kernels do not fit the pool.
        NativeUnavailable: native kernels were requested and cannot be built.
    """

    def __init__(
        self,
        cache: KVCache,
        policy: Policy,
        options: CompressionOptions,
        scale: float,
        kernels: KernelChoice = "auto",
        num_threads: int | None = None,
    ) -> None:
        spec = cache.spec
        if options.window != spec.window:
            raise ConfigError(
                f"window is {options.window} but the pool's query slots hold {spec.window} queries"
            )
        if spec.num_query_slots < 1:
            raise ConfigError("compression needs a pool with at least 1 query slot, got 0")
        self.cache = cache
        self.policy = policy
        self.options = options
        self.scale = scale
        self._choice, self._num_threads = kernels, num_threads
        self._kernels = make_kernels(cache, kernels, num_threads)

    def run(self, job: CompressionJob) -> None:
        """Compress one request's cache.

        Afterwards the target blocks hold `job.keep` tokens per layer and KV head, with their
        keys, values, stored scores and positions. Source blocks that are not targets are not
        written.

        Raises:
            ValueError: the job's numbers contradict one another or the pool.
        """
        self._check(job)
        num_layers, size = self.cache.spec.num_layers, self._layers_at_once(job.length)
        parts = [(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
        parts.reverse()
        while parts:
            part = parts.pop()
            if not self._run_layers(job, *part):
                middle = sum(part) // 2
                parts += [(middle, part[1]), (part[0], middle)]
                release_memory(self.cache.spec.device)

    def _layers_at_once(self, length: int) -> int:
        """Layers whose scratch for a cache of `length` tokens stays below `SCRATCH_BYTES`."""
        spec, scratch = self.cache.spec, _SCRATCH_OF_TOKEN
        if self._kernels is None:
            # Keys and values in blocks and in slot order, in fp32, and normalised.
            scratch += spec.head_dim * (4 * spec.dtype.itemsize + 4 * 4)
        return max(1, min(spec.num_layers, SCRATCH_BYTES // (scratch * length * spec.num_kv_heads)))

    def _run_layers(self, job: CompressionJob, first: int, last: int) -> bool:
        """Compress some layers. False, with nothing written, if out of memory and fewer may fit."""
        options, cache, kernels = self.options, self.cache, self._kernels
        if last - first < cache.spec.num_layers:
            cache = cache.layers(first, last)
            if kernels is not None:
                kernels = make_kernels(cache, self._choice, self._num_threads)
        view = CacheView(cache, job, self.scale, options.window, options.seed, kernels, first)
        protect_below = options.num_sinks
        if job.prompt_len <= options.protect_prompt * job.keep:
            protect_below = max(protect_below, job.prompt_len)
        stable = options.compaction == "stable"
        try:
            result = self.policy.scores(view)
        except Exception as error:
            if last - first == 1 or not is_out_of_memory(error):
                raise
            return False
        if kernels is not None:
            kernels.select_and_compact(
                job, result.final, result.stored, options.window, protect_below, stable
            )
            return True
        kept = select_tokens(result.final, view.positions, job.keep, options.window, protect_below)
        slots = plan_stable(kept, job.keep) if stable else plan_holes(kept, job.keep)
        move_tokens(
            cache, job.source_blocks, job.target_blocks, slots, view.positions, result.stored
        )
        return True

    def warm_up(self, num_blocks: int, longest: int = 0) -> None:
        """Compile and load what `run` needs, and use as much scratch as it ever does.

        Runs on the first blocks of the pool, which are overwritten; a job with more blocks than the
        pool lists them repeatedly. Does nothing if `num_blocks` hold too little to be compressed.

        Args:
            num_blocks: blocks of a request when it is compressed.
            longest: tokens of the longest cache that may be compressed, if that is more.
        """
        b = self.cache.spec.block_size
        keep = (num_blocks - 1) * b
        if keep < max(b, self.options.window + self.options.num_sinks):
            return
        for length in sorted({keep + b, max(longest, keep + b)}):
            size = -(-length // b)
            blocks = tuple(i % min(num_blocks, self.cache.spec.num_blocks) for i in range(size))
            for prompt_len in {0, int(self.options.protect_prompt * keep)}:
                # A longer cache belongs to a prompt, which has no scores yet.
                for num_scored in (0, keep) if length == keep + b else (0,):
                    job = CompressionJob(
                        request_id="warm-up",
                        source_blocks=blocks,
                        target_blocks=blocks[: num_blocks - 1],
                        length=length,
                        keep=keep,
                        query_slot=0,
                        num_scored=num_scored,
                        num_tokens=length,
                        prompt_len=prompt_len,
                        compression_index=int(num_scored > 0),
                    )
                    # All parts of a job are alike.
                    self._run_layers(job, 0, self._layers_at_once(length))

    def _check(self, job: CompressionJob) -> None:
        """Refuse a job that would read or write outside its blocks."""
        spec, b = self.cache.spec, self.cache.spec.block_size
        capacity = len(job.source_blocks) * b
        sound = (
            job.keep == len(job.target_blocks) * b
            and job.keep < job.length <= capacity
            and capacity - b < job.length <= job.num_tokens
            and 0 <= job.num_scored <= job.length
            and job.keep >= self.options.window + self.options.num_sinks
            and 0 <= job.query_slot < spec.num_query_slots
            and len({*job.source_blocks}) == len(job.source_blocks)
            and len({*job.target_blocks}) == len(job.target_blocks)
            and all(
                target == source or target not in job.source_blocks
                for source, target in zip(job.source_blocks, job.target_blocks, strict=False)
            )
            and min(job.source_blocks + job.target_blocks) >= 0
            and max(job.source_blocks + job.target_blocks) < spec.num_blocks
        )
        if not sound:
            raise ValueError(f"request {job.request_id}: impossible compression job {job}")
