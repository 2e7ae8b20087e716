"""Ownership of KV blocks: free list, reference counts, and the LRU of cached unowned blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """The pool has too few available blocks. A scheduling bug: check `num_available` first."""


class BlockPool:
    """Blocks 0 .. num_blocks-1, each in exactly one state.

    *free*: no owner, no content worth keeping. *owned*: one or more owners. *cached*: no owner,
    but its hash is live, so a later request may reuse it; the least recently released is evicted
    first when blocks run short.

    A block is *shared* when it has more than one owner or a live hash; a shared block must never
    be written to.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without owner and content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unowned blocks kept for later prefix hits."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks `allocate` can give: free ones and evictable cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        """Number of owners of a block."""
        return self._refs[block]

    def num_private(self, blocks: Sequence[int], others: Collection[int] = ()) -> int:
        """How many of these blocks have a single owner and are not among `others`."""
        refs = self._refs
        return sum([refs[block] == 1 and block not in others for block in blocks])

    def block_hash(self, block: int) -> bytes | None:
        """The live hash of a block, if any."""
        return self._hash_of[block]

    def is_shared(self, block: int) -> bool:
        """Whether the block must not be written: several owners, or a live hash."""
        return self._refs[block] > 1 or self._hash_of[block] is not None

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this hash, owned or cached."""
        return self._block_of.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one owner each, evicting cached blocks if needed.

        Raises:
            OutOfBlocks: fewer than `count` are available; nothing is taken.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"asked for {count} blocks, {self.num_available} available")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def acquire(self, block: int) -> None:
        """Add an owner to a block found by `lookup`."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and has no content to share")
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block.

        Blocks are released last to first, so that the last of a request's cached blocks, which is
        useless without the ones before it, is evicted first.

        Raises:
            ValueError: a block has no owner (double free).
        """
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise ValueError(f"double free of block {block}")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Make an owned block findable, unless another block already has this hash."""
        if self._refs[block] <= 0:
            raise ValueError(f"block {block} has no owner")
        if block_hash not in self._block_of:
            self._forget(block)
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def drop_hash(self, block: int) -> None:
        """Make an owned block unfindable, so that its single owner may write to it."""
        if self._refs[block] <= 0:
            raise ValueError(f"block {block} has no owner")
        self._forget(block)

    def forget(self, block_hash: bytes) -> None:
        """Make the block of a hash unfindable, owned or not; does nothing if there is none."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self._forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the block lists of all owners.

        Raises:
            AssertionError: a count, a state or the hash table is inconsistent.
        """
        refs = [0] * self.num_blocks
        for blocks in owners:
            if len(set(blocks)) != len(blocks):
                raise AssertionError(f"a request owns a block twice: {blocks}")
            for block in blocks:
                refs[block] += 1
        if refs != self._refs:
            wrong = [b for b in range(self.num_blocks) if refs[b] != self._refs[b]]
            raise AssertionError(f"reference counts of blocks {wrong} differ from their owners")
        free, cached = set(self._free), set(self._cached)
        owned = {b for b in range(self.num_blocks) if refs[b]}
        if len(free) != len(self._free) or free & cached or free & owned or cached & owned:
            raise AssertionError("a block is in two states")
        if len(free) + len(cached) + len(owned) != self.num_blocks:
            raise AssertionError("a block is in no state")
        if any(self._hash_of[b] is not None for b in free):
            raise AssertionError("a free block has a live hash")
        if any(self._hash_of[b] is None for b in cached):
            raise AssertionError("a cached block has no hash")
        live = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        if live != self._block_of:
            raise AssertionError("the hash table differs from the blocks' hashes")
