"""Which blocks a compression writes to: pure bookkeeping, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from zipage.cache.block_pool import BlockPool
from zipage.compression.job import CompressionJob
from zipage.engine.request import Request


@dataclass(frozen=True)
class TargetPlan:
    """Where the survivors of one request go.

    Attributes:
        reused: own blocks written in place, in slot order.
        unhashed: those of `reused` whose hash must be dropped first.
        num_new: blocks to allocate for the rest.
    """

    reused: tuple[int, ...]
    unhashed: tuple[int, ...]
    num_new: int


def plan_targets(request: Request, pool: BlockPool, headroom: int) -> TargetPlan:
    """Choose the `max_blocks` - 1 target blocks of a request that is due for compression.

    A block with other owners is never a target. A block that only this request owns but that the
    prefix cache lists is spared (its place is taken by a new block) if it holds prompt tokens and
    the pool keeps `headroom` available blocks besides; otherwise its hash is dropped.
    """
    assert request.max_blocks is not None
    wanted = request.max_blocks - 1
    prompt_blocks = 0 if request.compressed else request.prompt_len // request.block_size
    own = [b for b in request.block_ids if pool.ref_count(b) == 1]
    worth_sparing = {
        b
        for b in request.block_ids[:prompt_blocks]
        if pool.ref_count(b) == 1 and pool.block_hash(b) is not None
    }
    plain = [b for b in own if b not in worth_sparing]
    spare = max(0, pool.num_available - headroom)
    num_new = min(max(0, wanted - len(plain)), max(spare, wanted - len(own)))
    in_place = wanted - num_new
    chosen = set(plain[:in_place])
    for block in own:
        if len(chosen) == in_place:
            break
        chosen.add(block)
    reused = tuple(b for b in own if b in chosen)
    unhashed = tuple(b for b in reused if pool.block_hash(b) is not None)
    return TargetPlan(reused, unhashed, num_new)


def make_job(request: Request, plan: TargetPlan, pool: BlockPool) -> CompressionJob:
    """Allocate the new blocks of a plan and describe the compression.

    From here on the request owns its source blocks and the new ones until `finish_job`.
    """
    assert request.query_slot is not None
    for block in plan.unhashed:
        pool.drop_hash(block)
    new_blocks = pool.allocate(plan.num_new)
    target = [*plan.reused, *new_blocks]
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
    )


def surplus_blocks(job: CompressionJob) -> list[int]:
    """Source blocks a finished compression no longer needs."""
    kept = set(job.target_blocks)
    return [block for block in job.source_blocks if block not in kept]


def new_blocks(job: CompressionJob) -> list[int]:
    """Target blocks that were allocated for a compression."""
    source = set(job.source_blocks)
    return [block for block in job.target_blocks if block not in source]
