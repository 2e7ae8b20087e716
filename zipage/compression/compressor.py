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


@dataclass(frozen=True)
class CompressionOptions:
    """What is common to all policies.

    Attributes:
        window: w, the last tokens of the cache; never evicted.
        compaction: ``"stable"`` keeps the survivors in order, ``"holes"`` moves only those whose
            block is given up; the kept set is the same.
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

    `run` may be called from any thread, beside decoding on other blocks and beside other runs on
    other jobs. On CUDA it only enqueues work on the current stream.

    Args:
        cache: the KV pool, with query slots.
        policy: what tokens are worth.
        options: what is common to all policies.
        scale: factor of the attention logits, usually ``1/sqrt(head_dim)``.
        kernels: which kernels; ``auto`` is native on the CPU for fp32 where they can be built,
            Triton on CUDA, else torch.
        num_threads: threads of the native kernels; None for torch's number.

    Raises:
        ConfigError: the options or the kernels asked for do not fit the pool.
        NativeUnavailable: native kernels were asked for and cannot be built.
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
        options = self.options
        view = CacheView(self.cache, job, self.scale, options.window, options.seed, self._kernels)
        result = self.policy.scores(view)
        protect_below = options.num_sinks
        if job.prompt_len <= options.protect_prompt * job.keep:
            protect_below = max(protect_below, job.prompt_len)
        stable = options.compaction == "stable"
        if self._kernels is not None:
            self._kernels.select_and_compact(
                job, result.final, result.stored, options.window, protect_below, stable
            )
            return
        kept = select_tokens(result.final, view.positions, job.keep, options.window, protect_below)
        slots = plan_stable(kept, job.keep) if stable else plan_holes(kept, job.keep)
        move_tokens(
            self.cache, job.source_blocks, job.target_blocks, slots, view.positions, result.stored
        )

    def warm_up(self, num_blocks: int) -> None:
        """Compile and load what `run` needs, by running it on the first blocks of the pool.

        They are overwritten. Does nothing if `num_blocks` hold too little to be compressed.

        Args:
            num_blocks: blocks of a request when it is compressed.
        """
        b = self.cache.spec.block_size
        keep = (num_blocks - 1) * b
        if keep < max(b, self.options.window + self.options.num_sinks):
            return
        blocks = tuple(range(num_blocks))
        for prompt_len in {0, int(self.options.protect_prompt * keep)}:
            for num_scored in (0, keep):
                self.run(
                    CompressionJob(
                        request_id="warm-up",
                        source_blocks=blocks,
                        target_blocks=blocks[:-1],
                        length=keep + b,
                        keep=keep,
                        query_slot=0,
                        num_scored=num_scored,
                        num_tokens=keep + b,
                        prompt_len=prompt_len,
                        compression_index=int(num_scored > 0),
                    )
                )

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
