"""Selection of the surviving tokens, and their move into the target blocks.

The torch references are `zipage.compression.select` and `zipage.compression.compactor`; kept sets
and layouts are identical.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zipage.kernels.triton.paging import text_positions

_VARYING = (
    "num_blocks", "length", "keep", "num_scored", "first_position", "protect_below",
    "num_source", "num_tiles", "num_plan_tiles", "most_movers", "pairs", "tiles_per_program",
)  # fmt: skip
_INF: tl.constexpr = tl.constexpr(0x7F800000)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 31))
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# The order key of -inf and NaN.
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
    """int32 keys in the order of the scores: +inf if protected, below all others past the end."""
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
    stored,
    scores,
    positions,
    table,
    sources,
    targets,
    counts,
    num_blocks,
    length,
    keep,
    num_scored,
    first_position,
    protect_below,
    num_source,
    num_tiles,
    num_plan_tiles,
    most_movers,
    pairs,
    HAS_STORED: tl.constexpr,
    PROTECT: tl.constexpr,
    STABLE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PLAN_TILE: tl.constexpr,
):
    """Find the `keep` largest scores (equal ones: the newer slots) and plan their moves.

    Grid ``(L * H,)``. The smallest key kept is found bit by bit, by counting; with `ONE_TILE` the
    keys stay in registers meanwhile. Writes the source and target slots of tokens that move,
    `sources` and `targets` ``[L, H, pairs]``, and how many there are, `counts` ``[L, H, 2]``:

    - `STABLE`: pair r moves the r-th survivor to slot r; all survivors are pairs.
    - Otherwise pair n < `counts[..., 0]` moves the n-th survivor at or beyond slot `keep` into the
      n-th hole, and pair `most_movers` + n, n < `counts[..., 1]`, is a survivor that keeps its slot
      in a redirected block. The state of survivors that keep their slots is written here.
    """
    layer_head = tl.program_id(0)
    if ONE_TILE:
        all_keys = _order_keys(
            score_bits, positions, table, tl.arange(0, TILE), layer_head, num_blocks, length,
            num_scored, first_position, protect_below, PROTECT, WINDOW, KV_HEADS, BLOCK,
        )  # fmt: skip
    # Steps 0-31 fix the bits of the smallest key kept from the top (the sign bit is inverted, as
    # negative keys are smaller); step 32 counts the keys above it.
    least = _LOWEST
    at_least = length
    above = 0
    for step in range(33):
        candidate = least + 1
        if step == 0:
            candidate = 0
        elif step < 32:
            candidate = least | (1 << (31 - step))
        if ONE_TILE:
            count = tl.sum((all_keys >= candidate).to(tl.int32), 0)
        else:
            count = 0
            for tile in range(num_tiles):
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

    layer = layer_head // KV_HEADS
    head = layer_head % KV_HEADS
    source_row = sources + layer_head.to(tl.int64) * pairs
    target_row = targets + layer_head.to(tl.int64) * pairs
    ties_before = 0
    targets_before = 0
    movers_before = 0
    redirected_before = 0
    for tile in range(num_plan_tiles):
        slot = tile * PLAN_TILE + tl.arange(0, PLAN_TILE)
        keys = _order_keys(
            score_bits, positions, table, slot, layer_head, num_blocks, length, num_scored,
            first_position, protect_below, PROTECT, WINDOW, KV_HEADS, BLOCK,
        )  # fmt: skip
        tie = (keys == least).to(tl.int32)
        newer_ties = ties - ties_before - tl.cumsum(tie, 0)
        kept = (keys > least) | ((keys == least) & (newer_ties < wanted))
        ties_before += tl.sum(tie, 0)
        if STABLE:
            survivor = kept.to(tl.int32)
            rank = targets_before + tl.cumsum(survivor, 0) - 1
            tl.store(source_row + rank, slot, mask=kept)
            tl.store(target_row + rank, rank, mask=kept)
            targets_before += tl.sum(survivor, 0)
        else:
            in_front = slot < keep
            is_hole = in_front & (kept == 0)
            hole = is_hole.to(tl.int32)
            rank = targets_before + tl.cumsum(hole, 0) - 1
            tl.store(target_row + rank, slot, mask=is_hole)
            targets_before += tl.sum(hole, 0)

            is_mover = kept & (slot >= keep)
            mover = is_mover.to(tl.int32)
            rank = movers_before + tl.cumsum(mover, 0) - 1
            tl.store(source_row + rank, slot, mask=is_mover)
            movers_before += tl.sum(mover, 0)

            stays = kept & in_front
            from_block = tl.load(table + slot // BLOCK, mask=stays, other=0)
            to_block = tl.load(table + num_source + slot // BLOCK, mask=stays, other=0)
            is_redirected = stays & (from_block != to_block)
            redirected = is_redirected.to(tl.int32)
            rank = most_movers + redirected_before + tl.cumsum(redirected, 0) - 1
            tl.store(source_row + rank, slot, mask=is_redirected)
            tl.store(target_row + rank, slot, mask=is_redirected)
            redirected_before += tl.sum(redirected, 0)
            position = text_positions(
                positions, table, slot, stays, layer, head, num_blocks, num_scored,
                first_position, KV_HEADS, BLOCK,
            )  # fmt: skip
            _store_state(
                scores, positions, stored, slot, slot, to_block, position, stays, layer_head,
                num_blocks, length, HAS_STORED, KV_HEADS, BLOCK,
            )  # fmt: skip
    tl.store(counts + layer_head * 2, targets_before)
    tl.store(counts + layer_head * 2 + 1, redirected_before)


@triton.jit
def _store_state(
    scores,
    positions,
    stored,
    source,
    target,
    target_block,
    position,
    mask,
    layer_head,
    num_blocks,
    length,
    HAS_STORED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the position and the new score of source slots to their target slots."""
    page = (layer_head // KV_HEADS).to(tl.int64) * num_blocks + target_block
    at = (page * KV_HEADS + layer_head % KV_HEADS) * BLOCK + target % BLOCK
    if HAS_STORED:
        row = stored + layer_head.to(tl.int64) * length
        score = tl.load(row + source, mask=mask, other=0.0)
    else:
        score = tl.zeros(position.shape, tl.float32)
    tl.store(positions + at, position, mask=mask)
    tl.store(scores + at, score, mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def move_survivors(
    kv,
    stored,
    scores,
    positions,
    table,
    sources,
    targets,
    counts,
    num_blocks,
    length,
    num_scored,
    first_position,
    num_source,
    most_movers,
    pairs,
    tiles_per_program,
    HAS_STORED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move the pairs of `select_and_plan`: keys, values, stored scores and positions.

    Grid ``(programs, 2, L * H)``; program (p, which, layer and head) moves the keys and state
    (which 0) or the values (1) of pairs in tiles
    ``[p * tiles_per_program, (p + 1) * tiles_per_program)``. `table` has the source blocks, then
    the target blocks.

    This works in place, without a copy of the cache, because no slot is written before it is read:

    - Redirected target blocks are not source blocks, so nobody reads them. That leaves writes to
      slots below `keep` of blocks that are both source and target.
    - Filling holes: every token read is either at or beyond slot `keep`, hence not in a target
      block, or keeps its slot in a redirected block, whose source is not a target.
    - Stable: sources ascend, and the r-th is at slot r or beyond. One program (with all tiles)
      works upwards and reads each tile before writing it, so later tiles read beyond everything
      written so far.
    """
    which = tl.program_id(1)
    layer_head = tl.program_id(2)
    layer = layer_head // KV_HEADS
    head = layer_head % KV_HEADS
    d = tl.arange(0, DIM_PAD)
    num_movers = tl.load(counts + layer_head * 2)
    num_redirected = tl.load(counts + layer_head * 2 + 1)
    row = layer_head.to(tl.int64) * pairs
    first = tl.program_id(0) * tiles_per_program
    last = tl.minimum(first + tiles_per_program, (pairs + TILE - 1) // TILE)
    for tile in range(first, last):
        pair = tile * TILE + tl.arange(0, TILE)
        redirected = pair - most_movers
        there = (pair < num_movers) | ((redirected >= 0) & (redirected < num_redirected))
        source = tl.load(sources + row + pair, mask=there, other=0)
        target = tl.load(targets + row + pair, mask=there, other=0)
        source_block = tl.load(table + source // BLOCK, mask=there, other=0)
        target_block = tl.load(table + num_source + target // BLOCK, mask=there, other=0)
        from_page = (layer.to(tl.int64) * num_blocks + source_block) * 2 + which
        to_page = (layer.to(tl.int64) * num_blocks + target_block) * 2 + which
        from_row = ((from_page * KV_HEADS + head) * BLOCK + source % BLOCK) * DIM
        to_row = ((to_page * KV_HEADS + head) * BLOCK + target % BLOCK) * DIM
        moves = there & (from_row != to_row)
        mask = moves[:, None] & (d[None, :] < DIM)
        tokens = tl.load(kv + from_row[:, None] + d[None, :], mask=mask, other=0.0)
        has_state = tl.where(which == 0, there, False)
        position = text_positions(
            positions, table, source, has_state, layer, head, num_blocks, num_scored,
            first_position, KV_HEADS, BLOCK,
        )  # fmt: skip
        # Threads of this program write what its other threads read.
        tl.debug_barrier()
        tl.store(kv + to_row[:, None] + d[None, :], tokens, mask=mask)
        _store_state(
            scores, positions, stored, source, target, target_block, position, has_state,
            layer_head, num_blocks, length, HAS_STORED, KV_HEADS, BLOCK,
        )  # fmt: skip
