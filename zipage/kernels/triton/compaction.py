"""Selection of the survivors, and their move into the target blocks.

The torch references are `zipage.compression.select` and `zipage.compression.compactor`; kept sets
and layouts are theirs, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zipage.kernels.triton.paging import text_positions

_VARYING = (
    "num_blocks", "length", "keep", "num_scored", "first_position", "protect_below",
    "num_source", "num_tiles", "num_plan_tiles", "tiles_per_program",
)  # fmt: skip
_INF: tl.constexpr = tl.constexpr(0x7F800000)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 31))
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# The order key of -inf, also that of NaN.
_MINUS_INF_KEY: tl.constexpr = tl.constexpr(-(0x7F800000 + 1))


@triton.jit
def _order_keys(
    score_bits,
    positions,
    table,
    slot,
    layer_head,
    num_blocks,
    length,
    num_scored,
    first_position,
    protect_below,
    PROTECT: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """int32 in the order of the scores, +inf where protected; below all others past the end."""
    there = slot < length
    at = layer_head.to(tl.int64) * length + slot
    bits = tl.load(score_bits + at, mask=there, other=0)
    magnitude = bits & _MAGNITUDE
    key = tl.where(bits < 0, -magnitude - 1, bits)
    key = tl.where(magnitude == 0, 0, key)
    key = tl.where(magnitude > _INF, _MINUS_INF_KEY, key)
    protected = slot >= length - WINDOW
    if PROTECT:
        position = text_positions(
            positions, table, slot, there, layer_head // KV_HEADS, layer_head % KV_HEADS,
            num_blocks, num_scored, first_position, KV_HEADS, BLOCK,
        )  # fmt: skip
        protected = protected | (position < protect_below)
    key = tl.where(protected, _INF, key)
    return tl.where(there, key, _LOWEST)


@triton.jit(do_not_specialize=_VARYING)
def select_and_plan(
    score_bits,
    positions,
    table,
    plan,
    movers,
    num_blocks,
    length,
    keep,
    num_scored,
    first_position,
    protect_below,
    num_tiles,
    num_plan_tiles,
    PROTECT: tl.constexpr,
    STABLE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PLAN_TILE: tl.constexpr,
):
    """Find the `keep` largest scores (equal ones: the newer slots) and where they go.

    Grid ``(L * H,)``. The least key kept is found bit by bit, by counting; `ONE_TILE` holds the
    keys in registers meanwhile. Writes

    - `plan`, ``[L, H, keep]``: source slot of each target slot. When holes are filled, -1 - n for
      a hole, n being its rank;
    - `movers`, ``[L, H, T - keep]``: source slots of the survivors behind slot `keep`, by rank.
      Unused when `STABLE`.
    """
    layer_head = tl.program_id(0)
    if ONE_TILE:
        all_keys = _order_keys(
            score_bits, positions, table, tl.arange(0, TILE), layer_head, num_blocks, length,
            num_scored, first_position, protect_below, PROTECT, WINDOW, KV_HEADS, BLOCK,
        )  # fmt: skip
    # Steps 0-31 fix the bits of the least key kept from the top (the sign bit is inverted, for
    # negative keys are the smaller ones); step 32 counts what lies above it.
    least = _LOWEST
    at_least = length
    above = 0
    for step in range(0, 33):
        candidate = least + 1
        if step == 0:
            candidate = 0
        elif step < 32:
            candidate = least | (1 << (31 - step))
        if ONE_TILE:
            count = tl.sum((all_keys >= candidate).to(tl.int32), 0)
        else:
            count = 0
            for tile in range(0, num_tiles):
                keys = _order_keys(
                    score_bits, positions, table, tile * TILE + tl.arange(0, TILE), layer_head,
                    num_blocks, length, num_scored, first_position, protect_below, PROTECT,
                    WINDOW, KV_HEADS, BLOCK,
                )  # fmt: skip
                count += tl.sum((keys >= candidate).to(tl.int32), 0)
        if step == 32:
            above = count
        elif count >= keep:
            least = candidate
            at_least = count
    ties = at_least - above
    wanted = keep - above

    ties_before = 0
    front_before = 0
    behind_before = 0
    for tile in range(0, num_plan_tiles):
        slot = tile * PLAN_TILE + tl.arange(0, PLAN_TILE)
        keys = _order_keys(
            score_bits, positions, table, slot, layer_head, num_blocks, length, num_scored,
            first_position, protect_below, PROTECT, WINDOW, KV_HEADS, BLOCK,
        )  # fmt: skip
        tie = (keys == least).to(tl.int32)
        newer_ties = ties - ties_before - tl.cumsum(tie, 0)
        kept = (keys > least) | ((keys == least) & (newer_ties < wanted))
        ties_before += tl.sum(tie, 0)
        plan_row = plan + layer_head.to(tl.int64) * keep
        if STABLE:
            survivors = kept.to(tl.int32)
            rank = front_before + tl.cumsum(survivors, 0) - 1
            tl.store(plan_row + rank, slot, mask=kept)
            front_before += tl.sum(survivors, 0)
        else:
            in_front = slot < keep
            hole = (in_front & (kept == 0)).to(tl.int32)
            hole_rank = front_before + tl.cumsum(hole, 0) - 1
            tl.store(plan_row + slot, tl.where(kept, slot, -1 - hole_rank), mask=in_front)
            front_before += tl.sum(hole, 0)
            moves = kept & (slot >= keep)
            mover = moves.to(tl.int32)
            mover_rank = behind_before + tl.cumsum(mover, 0) - 1
            mover_row = movers + layer_head.to(tl.int64) * (length - keep)
            tl.store(mover_row + mover_rank, slot, mask=moves)
            behind_before += tl.sum(mover, 0)


@triton.jit(do_not_specialize=_VARYING)
def move_survivors(
    kv,
    scores,
    positions,
    table,
    stored,
    plan,
    movers,
    num_blocks,
    length,
    keep,
    num_scored,
    first_position,
    num_source,
    tiles_per_program,
    HAS_STORED: tl.constexpr,
    STABLE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fill the target blocks with keys, values, stored scores and positions.

    Grid ``(programs, 2, L * H)``; program (p, which, layer and head) fills tiles
    ``[p * tiles_per_program, (p + 1) * tiles_per_program)`` of the target slots with keys (which
    0, and the state) or values (1). `table` has the source blocks, then the target blocks.

    In place without a copy of the cache, since nothing is written before it was read:

    - Redirected target blocks are not source blocks, so nobody reads them. What is left are writes
      to target slots r < keep of blocks that stay.
    - Filling holes: a survivor from slot >= keep comes from a block that is no target; one that
      stays moves nothing, and its state is read and written by the same program.
    - Stable: sources ascend and source(r) >= r. One program (`tiles_per_program` covers all)
      works upwards and reads a tile before it writes it, so what later tiles read, slots >= their
      r, lies behind all that is written so far.
    """
    which = tl.program_id(1)
    layer_head = tl.program_id(2)
    layer = layer_head // KV_HEADS
    head = layer_head % KV_HEADS
    d = tl.arange(0, DIM_PAD)
    first = tl.program_id(0) * tiles_per_program
    last = tl.minimum(first + tiles_per_program, (keep + TILE - 1) // TILE)
    for tile in range(first, last):
        target = tile * TILE + tl.arange(0, TILE)
        there = target < keep
        source = tl.load(plan + layer_head.to(tl.int64) * keep + target, mask=there, other=0)
        if not STABLE:
            hole = source < 0
            mover_row = movers + layer_head.to(tl.int64) * (length - keep)
            mover = tl.load(mover_row + (-1 - source), mask=there & hole, other=0)
            source = tl.where(hole, mover, source)
        source_block = tl.load(table + source // BLOCK, mask=there, other=0)
        target_block = tl.load(table + num_source + target // BLOCK, mask=there, other=0)
        from_slot = layer.to(tl.int64) * num_blocks + source_block
        to_slot = layer.to(tl.int64) * num_blocks + target_block
        moves = there & ((source != target) | (source_block != target_block))
        from_row = (((from_slot * 2 + which) * KV_HEADS + head) * BLOCK + source % BLOCK) * DIM
        to_row = (((to_slot * 2 + which) * KV_HEADS + head) * BLOCK + target % BLOCK) * DIM
        mask = moves[:, None] & (d[None, :] < DIM)
        tokens = tl.load(kv + from_row[:, None] + d[None, :], mask=mask, other=0.0)

        has_state = there & (which == 0)
        position = text_positions(
            positions, table, source, has_state, layer, head, num_blocks, num_scored,
            first_position, KV_HEADS, BLOCK,
        )  # fmt: skip
        if HAS_STORED:
            stored_row = stored + layer_head.to(tl.int64) * length
            score = tl.load(stored_row + source, mask=has_state, other=0.0)
        else:
            score = tl.zeros([TILE], tl.float32)
        # Threads of this program write what others of it read.
        tl.debug_barrier()
        tl.store(kv + to_row[:, None] + d[None, :], tokens, mask=mask)
        state = (to_slot * KV_HEADS + head) * BLOCK + target % BLOCK
        tl.store(positions + state, position, mask=has_state)
        tl.store(scores + state, score, mask=has_state)
