"""Penalties, and draws filtered by min-p, top-k and top-p, without host synchronisation.

R rows of logits, V token ids, D draws, B blocks of 256 tokens. A draw needs one read of its row, by
many programs, for the maximum and the mass of each block. One program then finds the tokens kept
and draws. No token below the k-th largest block maximum is among the k most likely ones, so a few
blocks hold all candidates; where they do not (a larger nucleus, many ties), the same searches run
over the whole row. Masses are summed in fp64, as in the reference, `zipage.execution.categorical`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Numbers per draw, see `draw_rows`.
COLUMNS = 7
_BLOCK = 256
_TILE = 4096
#: A nucleus is first searched among tokens at least as likely as this many block maxima.
_NUCLEUS_BLOCKS = 128


@triton.jit
def _key(value):
    """Orders fp32 numbers as integers; its own inverse on the bits."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(row, token, mask, peak, inverse_temperature):
    values = tl.load(row + token, mask=mask, other=float("-inf")).to(tl.float32)
    return (values - peak) * inverse_temperature


@triton.jit
def _tile(row, kept, held, num, start, peak, inverse_temperature, TILE: tl.constexpr):
    """Scores from `start` on, of `num`: of the candidates if `held` is `num`, of the row if 0."""
    at = start + tl.arange(0, TILE)
    candidates = tl.load(kept + at, mask=at < held, other=float("-inf"))
    others = _scaled(row, at, (at >= held) & (at < num), peak, inverse_temperature)
    return tl.where(at < held, candidates, others)


@triton.jit
def _mass(row, kept, held, num, peak, inverse_temperature, floor, TILE: tl.constexpr):
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, num, TILE):
        scores = _tile(row, kept, held, num, start, peak, inverse_temperature, TILE)
        mass += tl.sum(tl.where(scores >= floor, tl.exp(scores), 0.0).to(tl.float64), 0)
    return mass


@triton.jit
def _search(
    row, kept, held, num, peak, inverse_temperature, floor, goal, COUNT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest score >= `floor` such that it and all larger ones reach `goal`; else `floor`.

    Bisects the interval of bit patterns, moving its ends to scores that occur.
    """
    low = _key(floor)
    high = tl.full((), 0, tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        threshold = _value(middle)
        amount = tl.full((), 0.0, tl.float64)
        least = tl.full((), float("inf"), tl.float32)
        most = tl.full((), float("-inf"), tl.float32)
        for start in range(0, num, TILE):
            scores = _tile(row, kept, held, num, start, peak, inverse_temperature, TILE)
            inside = scores >= threshold
            each = tl.where(inside, 1.0 if COUNT else tl.exp(scores), 0.0)
            amount += tl.sum(each.to(tl.float64), 0)
            least = tl.minimum(least, tl.min(tl.where(inside, scores, float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.where(inside, float("-inf"), scores), 0))
        enough = amount >= goal
        low = tl.where(enough, tl.maximum(_key(least), middle), low)
        high = tl.where(enough, high, tl.minimum(_key(most), middle - 1))
    return _value(low)


@triton.jit
def _summarise_kernel(
    logits, peaks, table, maxima, masses, vocab_size, num_blocks,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    numbers = table + item * COLUMNS
    row = logits + tl.load(numbers).to(tl.int64) * vocab_size
    peak = tl.load(peaks + tl.load(numbers + 1).to(tl.int64)).to(tl.float32)
    block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inverse_temperature = tl.load(numbers + 2).to(tl.float32)
    scores = _scaled(row, token, token < vocab_size, peak, inverse_temperature)
    there = block < num_blocks
    tl.store(maxima + item * BLOCKS + block, tl.max(scores, 1), mask=there)
    mass = tl.sum(tl.exp(scores).to(tl.float64), 1)
    tl.store(masses + item * BLOCKS + block, mass, mask=there)


@triton.jit
def _draw_kernel(
    logits, peaks, table, maxima, masses, blocks, kept, kept_ids, out, vocab_size, num_blocks,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    NUCLEUS_BLOCKS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    numbers = table + item * COLUMNS
    row = logits + tl.load(numbers).to(tl.int64) * vocab_size
    into = tl.load(numbers + 1).to(tl.int64)
    inverse_temperature = tl.load(numbers + 2).to(tl.float32)
    uniform = tl.load(numbers + 3)
    floor = tl.load(numbers + 4).to(tl.float32)
    top_k = tl.load(numbers + 5).to(tl.int32)
    top_p = tl.load(numbers + 6)
    peak = tl.load(peaks + into).to(tl.float32)
    blocks += item * BLOCKS
    kept += item * TILE
    kept_ids += item * TILE
    block = tl.arange(0, BLOCKS)
    there = block < num_blocks
    best = tl.load(maxima + item * BLOCKS + block, mask=there, other=float("-inf"))
    mass = tl.load(masses + item * BLOCKS + block, mask=there, other=0.0)
    limited = top_k < vocab_size
    nucleus = top_p < 1.0
    bare = floor == float("-inf")
    token = tl.full((), 0, tl.int32)
    # The host reports unusable logits; here their token only has to be a legal id.
    if tl.abs(peak) < float("inf"):
        if bare & (limited == 0) & (nucleus == 0):
            ends = tl.cumsum(mass, 0)
            target = uniform * tl.max(ends, 0)
            first = tl.min(tl.where(ends > target, block, BLOCKS), 0)
            first = tl.minimum(first, tl.max(tl.where(mass > 0.0, block, 0), 0))
            target -= tl.sum(tl.where(block == first - 1, ends, 0.0), 0)
            inner = tl.arange(0, BLOCK)
            at = first * BLOCK + inner
            scores = _scaled(row, at, at < vocab_size, peak, inverse_temperature)
            weight = tl.exp(scores).to(tl.float64)
            hit = (tl.cumsum(weight, 0) > target) & (weight > 0.0)
            token = tl.min(tl.where(hit, inner, BLOCK), 0)
            token = tl.minimum(token, tl.max(tl.where(weight > 0.0, inner, 0), 0))
            token += first * BLOCK
        else:
            # No token kept lies below `bound`, unless a nucleus proves larger.
            low = _key(tl.full((), float("-inf"), tl.float32))
            if limited | bare:
                high = tl.full((), 0, tl.int64)
                want = tl.where(limited, top_k, NUCLEUS_BLOCKS)
                while low < high:
                    middle = low + (high - low + 1) // 2
                    enough = tl.sum((best >= _value(middle)).to(tl.int32), 0) >= want
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
            bound = tl.maximum(_value(low), floor)
            chosen = (best >= bound) & there
            order = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(blocks + order, block, mask=chosen)
            num_chosen = tl.sum(chosen.to(tl.int32), 0) * BLOCK
            tl.debug_barrier()
            found = tl.full((), 0, tl.int32)
            mass_found = tl.full((), 0.0, tl.float64)
            for start in range(0, num_chosen, TILE):
                at = start + tl.arange(0, TILE)
                inside = at < num_chosen
                ids = tl.load(blocks + at // BLOCK, mask=inside, other=0) * BLOCK + at % BLOCK
                inside &= ids < vocab_size
                scores = _scaled(row, ids, inside, peak, inverse_temperature)
                inside &= scores >= bound
                place = found + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(kept + place, scores, mask=inside & (place < TILE))
                tl.store(kept_ids + place, ids, mask=inside & (place < TILE))
                found += tl.sum(inside.to(tl.int32), 0)
                mass_found += tl.sum(tl.where(inside, tl.exp(scores), 0.0).to(tl.float64), 0)
            tl.debug_barrier()
            total = tl.sum(mass, 0)
            few = found <= TILE
            few &= limited | (bare == 0) | (mass_found >= top_p * total)
            num = tl.where(few, found, vocab_size)
            held = tl.where(few, found, 0)
            lowest = tl.where(few, bound, floor)
            if limited:
                goal = top_k.to(tl.float64)
                lowest = _search(
                    row, kept, held, num, peak, inverse_temperature, lowest, goal, True, TILE
                )
            if nucleus:
                if limited | (bare == 0):
                    total = _mass(row, kept, held, num, peak, inverse_temperature, lowest, TILE)
                goal = top_p * total
                lowest = _search(
                    row, kept, held, num, peak, inverse_temperature, lowest, goal, False, TILE
                )
            target = _mass(row, kept, held, num, peak, inverse_temperature, lowest, TILE) * uniform
            before = tl.full((), 0.0, tl.float64)
            first = num
            last = tl.full((), 0, tl.int32)
            for start in range(0, num, TILE):
                scores = _tile(row, kept, held, num, start, peak, inverse_temperature, TILE)
                at = start + tl.arange(0, TILE)
                weight = tl.where(scores >= lowest, tl.exp(scores), 0.0).to(tl.float64)
                hit = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)
                first = tl.minimum(first, tl.min(tl.where(hit, at, num), 0))
                last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
                before += tl.sum(weight, 0)
            token = tl.minimum(first, last)
            token = tl.where(few, tl.load(kept_ids + token, mask=few, other=0), token)
    tl.store(out + into, token.to(tl.int64))


def draw_rows(
    logits: torch.Tensor, peaks: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Like `zipage.execution.categorical.draw_rows`; `logits` may have any dtype."""
    count, vocab_size = len(table), logits.shape[1]
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    padded = triton.next_power_of_2(num_blocks)
    device = logits.device
    maxima = torch.empty(count, padded, dtype=torch.float32, device=device)
    masses = torch.empty(count, padded, dtype=torch.float64, device=device)
    blocks = torch.empty(count, padded, dtype=torch.int32, device=device)
    kept = torch.empty(count, _TILE, dtype=torch.float32, device=device)
    kept_ids = torch.empty(count, _TILE, dtype=torch.int32, device=device)
    group = min(16, padded)
    _summarise_kernel[(count, triton.cdiv(num_blocks, group))](
        logits, peaks, table, maxima, masses, vocab_size, num_blocks,
        COLUMNS=COLUMNS, BLOCK=_BLOCK, GROUP=group, BLOCKS=padded, num_warps=4,
    )  # fmt: skip
    _draw_kernel[(count,)](
        logits, peaks, table, maxima, masses, blocks, kept, kept_ids, out, vocab_size, num_blocks,
        COLUMNS=COLUMNS, BLOCK=_BLOCK, BLOCKS=padded, TILE=_TILE, NUCLEUS_BLOCKS=_NUCLEUS_BLOCKS,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _penalise_kernel(logits, counts, table, vocab_size, TILE: tl.constexpr):
    numbers = table + tl.program_id(0) * 5
    row = tl.load(numbers).to(tl.int64) * vocab_size
    slot = tl.load(numbers + 1).to(tl.int64) * vocab_size
    repetition = tl.load(numbers + 2).to(tl.float32)
    frequency = tl.load(numbers + 3).to(tl.float32)
    presence = tl.load(numbers + 4).to(tl.float32)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = token < vocab_size
    seen = tl.load(counts + slot + token, mask=mask, other=0)
    values = tl.load(logits + row + token, mask=mask, other=0.0)
    repeated = tl.where(values > 0.0, values / repetition, values * repetition)
    values = tl.where(seen > 0, repeated, values)
    times = seen >> 1
    values -= frequency * times.to(tl.float32)
    values -= tl.where(times > 0, presence, 0.0)
    tl.store(logits + row + token, values, mask=mask)


def penalise(logits: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> None:
    """As `zipage.execution.penalties.penalise`."""
    vocab_size = logits.shape[1]
    tile = min(4096, triton.next_power_of_2(vocab_size))
    _penalise_kernel[(len(table), triton.cdiv(vocab_size, tile))](
        logits, counts, table, vocab_size, TILE=tile, num_warps=8
    )
