"""Runs the largest work of serving in advance, to measure its memory and compile kernels."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from zipage.config import EngineConfig
from zipage.engine.request import Request
from zipage.engine.scheduler import ScheduledTokens, StepPlan
from zipage.engine.sequence import SequenceState
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory, without_frames
from zipage.execution.logprobs import MAX_LOGITS
from zipage.execution.memory import DeviceMemory, MemoryPlan
from zipage.execution.sampler import SamplingState
from zipage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from zipage.cache.kv_cache import KVCacheSpec
    from zipage.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

#: Blocks of the pool used to measure. Sequences list them repeatedly for as many blocks as they
#: need: the content does not matter.
_BLOCKS = 2

#: Products of few rows are compiled for the next power of two.
_FEW_ROWS = (4, 20, 36, 68)

# Everything that costs memory. At this temperature top-p keeps almost all tokens.
_COSTLY = SamplingParams(
    temperature=1e4,
    top_p=1 - 1e-9,
    frequency_penalty=1.0,
    logprobs=20,
    prompt_logprobs=20,
    seed=0,
    detokenize=False,
)
_FILTERED = SamplingParams(temperature=1e4, top_p=1 - 1e-9, seed=0, detokenize=False)
_DRAWN = SamplingParams(temperature=1.0, seed=0, detokenize=False)
_GREEDY = SamplingParams(temperature=0.0, detokenize=False)


@dataclass(frozen=True)
class TrialStep:
    """A step to try.

    Attributes:
        parts: for each sequence, how many tokens are computed and how many are in its cache.
        capture: whether the first sequence's queries are stored in a query slot.
    """

    parts: tuple[tuple[int, int], ...]
    capture: bool = False


def trial_steps(config: EngineConfig, max_model_len: int) -> list[TrialStep]:
    """The largest steps of serving, and steps that need other variants of kernels.

    Args:
        config: the limits.
        max_model_len: longest text.
    """
    most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    sequences = min(config.max_num_seqs, most)
    each, more = divmod(most, sequences)
    chunk = min(most, max_model_len)
    steps = [
        # The most rows with the most logits, and the most rows with the longest cache.
        TrialStep(tuple((each + (i < more), 0) for i in range(sequences)), config.compresses),
        TrialStep(((chunk, max_model_len - chunk),)),
        TrialStep(((1, max_model_len - 1), *[(1, 0)] * (sequences - 1))),
    ]
    steps += [TrialStep(((rows, 0),)) for rows in _FEW_ROWS if rows <= chunk]
    # Some arguments are aligned only if the number of sequences is a multiple of four.
    for others in (1, 2):
        parts = ((2, 0), *[(1, 1)] * others)
        if len(parts) <= sequences and len(parts) < most and max_model_len > 1:
            steps += [TrialStep(parts), TrialStep(parts, config.compresses)]
    return steps


def measure(runner: ModelRunner, spec: KVCacheSpec, memory: DeviceMemory, free: int) -> MemoryPlan:
    """Run the largest steps, the largest compression and the captures of a loaded model.

    Args:
        runner: has loaded its model; is left without a cache.
        spec: the pool's shape.
        memory: the device's memory.
        free: bytes that were free before the model was loaded.

    Returns:
        The plan, without a pool.

    Raises:
        ConfigError: something does not fit even with a tiny pool, or a kernel needs more resources
            than a multiprocessor has.
    """
    started, compiled = time.perf_counter(), num_compiled_kernels()
    memory.release()
    plan = MemoryPlan(memory.total, free, weights=max(0, free - memory.free()))
    tiny = replace(spec, num_blocks=_BLOCKS, num_query_slots=min(1, spec.num_query_slots))
    work = {"steps": _run_steps, "compression": _compress, "graphs": _capture}
    stage = "pool"
    try:
        runner.make_cache(tiny)
        for stage, run in work.items():
            memory.release()
            before = memory.free()
            run(runner)
            # Torch keeps freed memory cached, so this is the peak.
            plan = replace(plan, **{stage: max(0, before - memory.free())})
    except Exception as error:
        if type(error).__name__ == "OutOfResources":  # Triton's, which may not be installed
            raise ConfigError(
                f"{runner.device} cannot run the Triton kernels of this model "
                f"({str(error).partition('. ')[0]}): use attention_backend='torch'"
            ) from error
        if not is_out_of_memory(error):
            raise
        cause = without_frames(error)
    else:
        runner.drop_cache()
        memory.release()
        seconds = time.perf_counter() - started
        logger.info("warmed up %d kernels in %.1f s", num_compiled_kernels() - compiled, seconds)
        return plan
    runner.drop_cache()
    memory.release()
    config = runner.config
    raise ConfigError(
        f"{runner.device} is out of memory before the KV pool is allocated, measuring "
        f"{stage}: lower "
        f"max_num_batched_tokens={config.max_num_batched_tokens}, "
        f"max_num_seqs={config.max_num_seqs} or max_model_len={runner.max_model_len}, or take "
        f"a smaller model (until then: {plan})"
    ) from cause


def _run_steps(runner: ModelRunner) -> None:
    runner.use_cache()
    runner.sampler.warm_up(runner.model_config.vocab_size, runner.model.dtype)
    steps = trial_steps(runner.config, runner.max_model_len)
    for step in steps:
        runner.execute(_plan(runner, step, [_COSTLY]))
    if runner.config.schedules_ahead(runner.device.type):
        for params in ([_COSTLY], [_FILTERED], [_DRAWN], [_DRAWN, _GREEDY]):
            plan = _plan(runner, steps[0], params)
            if runner.can_launch(plan.scheduled):
                runner.launch(plan, lambda: None).wait()


def _plan(runner: ModelRunner, step: TrialStep, params: list[SamplingParams]) -> StepPlan:
    """The step with one request per sequence, which take `params` in turn."""
    config, spec = runner.config, runner.cache.spec
    scheduled = []
    for row, (tokens, start) in enumerate(step.parts):
        end, ours = start + tokens, params[row % len(params)]
        # As many logits of the prompt as exist at once.
        wanted = max(start, end - 2 - MAX_LOGITS // runner.model_config.vocab_size)
        sampling = SamplingState(ours, [0] * end, [], (), runner.model_config.vocab_size)
        request = Request(
            f"warm-up-{row}",
            [0] * end,
            1,
            config.block_size,
            next_prompt_logits=wanted if row == 0 and ours.prompt_logprobs else None,
            payload=SequenceState(ours, sampling, stream=False),
        )
        request.num_computed = request.length = start
        request.row = row
        blocks = -(-end // config.block_size)
        request.set_blocks([i % spec.num_blocks for i in range(blocks)])
        if step.capture and row == 0:
            request.query_slot, request.trigger = 0, end
        scheduled.append(ScheduledTokens(request, tokens, True))
    return StepPlan(scheduled)


def _compress(runner: ModelRunner) -> None:
    if runner.compressor is None:
        return
    config = runner.config
    smallest = -(-(config.resolved_window + config.num_sinks) // config.block_size) + 1
    blocks = config.max_blocks_of(config.kv_budget) or smallest
    longest = 0 if config.bounded_prefill else runner.max_model_len
    stream: AbstractContextManager[object] = nullcontext()
    if runner.device.type == "cuda" and config.compresses_beside("cuda"):
        # Memory freed on one stream is not reused by others.
        stream = torch.cuda.stream(torch.cuda.Stream(runner.device))  # type: ignore[no-untyped-call]
    with stream:
        runner.compressor.warm_up(blocks, longest)


def _capture(runner: ModelRunner) -> None:
    runner.capture_graphs()


def num_compiled_kernels() -> int:
    """Compiled variants of Triton kernels in this process; 0 where Triton interprets them."""
    kernels: dict[int, object] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("zipage.kernels.triton."):
            kernels |= {id(value): value for value in vars(module).values()}
    count = 0
    for kernel in kernels.values():
        # By device: the compiled variants; newer versions of Triton hold them first in a tuple.
        caches = getattr(kernel, "device_caches", None) or getattr(kernel, "cache", None)
        if isinstance(caches, dict):
            parts = [c[0] if isinstance(c, tuple) else c for c in caches.values()]
            count += sum(len(part) for part in parts if isinstance(part, dict))
    return count
