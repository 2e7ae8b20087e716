"""Ownership of blocks: states, reference counts, LRU, and what must raise."""

from __future__ import annotations

import random

import pytest

from zipage.cache.block_pool import BlockPool, OutOfBlocks
from zipage.cache.prefix_cache import PrefixCache, hash_block


def test_double_free_raises() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="double free of block"):
        pool.release(blocks)
    pool.check_integrity([])


def test_double_free_of_a_cached_block_raises() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.set_hash(block, b"h")
    pool.release([block])
    with pytest.raises(ValueError, match="double free"):
        pool.release([block])


def test_allocating_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    owned = pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="asked for 3 blocks, 2 available"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([owned])


def test_a_free_block_cannot_be_acquired_or_hashed() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="is free"):
        pool.acquire(0)
    with pytest.raises(ValueError, match="has no owner"):
        pool.set_hash(0, b"h")
    with pytest.raises(ValueError, match="has no owner"):
        pool.drop_hash(0)


def test_cached_blocks_are_evicted_least_recently_released_first_and_deepest_first() -> None:
    pool = BlockPool(4)
    names = dict(enumerate(("old0", "old1", "new0", "new1")))
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.set_hash(block, names[block].encode())
    pool.release(old)
    pool.release(new)
    evicted = [names[pool.allocate(1)[0]] for _ in range(4)]
    assert evicted == ["old1", "old0", "new1", "new0"]
    assert pool.lookup(b"old0") is None


def test_short_memory_evicts_no_more_than_is_asked_for() -> None:
    """One block after another, the oldest first, and none while a free one is left."""
    rng = random.Random(1)
    pool = BlockPool(20)
    owned: list[list[int]] = []
    expected: list[int] = []  # cached blocks, the next to be evicted first
    evicted = 0
    for i in range(3000):
        count = rng.randint(1, 5)
        if pool.num_available >= count and rng.random() < 0.6:
            needed = max(0, count - pool.num_free)
            taken = pool.allocate(count)
            assert taken[count - needed :] == expected[:needed]
            expected, evicted = expected[needed:], evicted + needed
            owned.append(taken)
            if rng.random() < 0.8:
                for block in taken:
                    pool.set_hash(block, b"%d %d" % (i, block))
        elif owned:
            blocks = owned.pop(rng.randrange(len(owned)))
            expected += [b for b in reversed(blocks) if pool.block_hash(b) is not None]
            pool.release(blocks)
        assert pool.num_cached == len(expected)
        assert all(pool.lookup(pool.block_hash(block) or b"") == block for block in expected)
    assert evicted > 500
    pool.check_integrity(owned)


def test_an_acquired_cached_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.set_hash(block, b"h")
    pool.release([block])
    pool.acquire(block)
    assert pool.num_available == 1 and pool.allocate(1) != [block]
    assert pool.lookup(b"h") == block


def test_the_first_block_with_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"h")
    pool.set_hash(second, b"h")
    assert pool.lookup(b"h") == first and not pool.is_shared(second)
    pool.release([second])
    assert pool.num_free == 1 and pool.num_cached == 0


@pytest.mark.parametrize(
    "owners",
    [
        [[0], [1]],  # block 1 is free
        [],  # block 0 is owned by nobody
        [[0], [0]],  # block 0 has one owner, not two
        [[0, 0]],  # one owner, twice
    ],
)
def test_integrity_check_sees_wrong_owners(owners: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError):
        pool.check_integrity(owners)


def test_hashes_are_chained_and_salted() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=2)
    text = [1, 2, 3, 4]
    cache.register([], text, pool.allocate(2), 0, 2)
    assert len(cache.match([], text, 2)) == 2
    assert len(cache.match([], [1, 2, 9, 4], 2)) == 1
    other = [5, 6, 3, 4]
    cache.register([], other, pool.allocate(1), 0, 1)
    assert len(cache.match([], other, 2)) == 1, "equal tokens after others are another block"
    assert cache.match([], text, 2, salt=b"tenant") == []
    assert hash_block(b"", [1, 2]) != hash_block(b"", [2, 1])
