"""Which blocks a compression writes to: pure bookkeeping, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from zipage.cache.block_pool import BlockPool
from zipage.compression.job import CompressionJob
from zipage.engine.request import Request


@dataclass(frozen=True)
class TargetPlan:
    """Where the surviving tokens of one request go.

    Attributes:
        blocks: the `max_blocks` - 1 target blocks in slot order: entry i is the request's own
            i-th block, written in place, or None for a new one.
        unhashed: those of `blocks` whose hash must be dropped first.
    """

    blocks: tuple[int | None, ...]
    unhashed: tuple[int, ...]

    @property
    def num_new(self) -> int:
        """Blocks to allocate."""
        return self.blocks.count(None)


def plan_targets(request: Request, pool: BlockPool, headroom: int) -> TargetPlan:
    """Choose the target blocks of a request that is due for compression.

    Target i replaces the request's i-th block, so that the order of its slots, and with it every
    rounding error, does not depend on the state of the pool. A block with other owners is always
    replaced by a new one. A block that only this request owns but that is in the prefix cache is
    also replaced (and stays findable) if it holds prompt tokens and `headroom` available blocks
    remain in the pool; otherwise its hash is dropped and it is written in place.
    """
    assert request.max_blocks is not None
    own = request.block_ids[: request.max_blocks - 1]
    prompt_blocks = 0 if request.compressed else request.prompt_len // request.block_size
    spare = pool.num_available - headroom - sum(1 for b in own if pool.ref_count(b) > 1)
    blocks: list[int | None] = []
    unhashed = []
    for i, block in enumerate(own):
        findable = pool.block_hash(block) is not None
        if pool.ref_count(block) > 1:
            blocks.append(None)
        elif findable and i < prompt_blocks and spare > 0:
            blocks.append(None)
            spare -= 1
        else:
            blocks.append(block)
            if findable:
                unhashed.append(block)
    return TargetPlan(tuple(blocks), tuple(unhashed))


def make_job(request: Request, plan: TargetPlan, pool: BlockPool) -> CompressionJob:
    """Allocate the new blocks of a plan and describe the compression.

    From here on the request owns its source blocks and the new ones until the compression ends.
    """
    assert request.query_slot is not None
    for block in plan.unhashed:
        pool.drop_hash(block)
    fresh = iter(pool.allocate(plan.num_new))
    target = [next(fresh) if block is None else block for block in plan.blocks]
    return CompressionJob(
        request_id=request.request_id,
        source_blocks=tuple(request.block_ids),
        target_blocks=tuple(target),
        length=request.length,
        keep=len(target) * request.block_size,
        query_slot=request.query_slot,
        num_scored=request.num_scored,
        num_tokens=request.num_computed,
        prompt_len=request.prompt_len,
        compression_index=request.compressions,
        report_kept=request.report_kept,
    )


def surplus_blocks(job: CompressionJob) -> list[int]:
    """Source blocks a finished compression no longer needs."""
    kept = set(job.target_blocks)
    return [block for block in job.source_blocks if block not in kept]


def new_blocks(job: CompressionJob) -> list[int]:
    """Target blocks that were allocated for a compression."""
    source = set(job.source_blocks)
    return [block for block in job.target_blocks if block not in source]
