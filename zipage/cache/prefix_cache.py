"""Finding KV blocks of earlier requests by the text they hold."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from zipage.cache.block_pool import BlockPool


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: its tokens, and through `parent` everything before them."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def hash_salt(salt: bytes) -> bytes:
    """Parent of a text's first block; never equal to the hash of a block."""
    return hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()


class PrefixCache:
    """Maps token prefixes to blocks of the pool.

    Only full blocks are findable, each by a chained hash of a salt and all tokens up to its end.
    The salt is whatever gives equal tokens different keys and values, or must keep requests apart:
    a model, an adapter, a tenant.
    """

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.queries = 0
        self.hits = 0

    def extend_hashes(
        self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: bytes
    ) -> None:
        """Append to `hashes` until it covers the first `num_blocks` blocks of the text."""
        b = self.block_size
        while len(hashes) < num_blocks:
            i = len(hashes)
            parent = hashes[-1] if hashes else hash_salt(salt)
            hashes.append(hash_block(parent, token_ids[i * b : (i + 1) * b]))

    def match(
        self, hashes: list[bytes], token_ids: Sequence[int], max_blocks: int, salt: bytes = b""
    ) -> list[int]:
        """Blocks with the longest cached prefix, at most `max_blocks`; their owners do not change.

        `hashes` is the request's own list of block hashes, extended as needed.
        """
        found: list[int] = []
        if not self.enabled:
            return found
        for i in range(max_blocks):
            self.extend_hashes(hashes, token_ids, i + 1, salt)
            block = self.pool.lookup(hashes[i])
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make the blocks of these hashes unfindable, whoever owns them: their content is bad."""
        for block_hash in hashes:
            self.pool.forget(block_hash)

    def record(self, queried: int, hit: int) -> None:
        """Count the tokens of an admitted prompt and those found in the cache."""
        self.queries += queried
        self.hits += hit

    def register(
        self,
        hashes: list[bytes],
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        first: int,
        last: int,
        salt: bytes = b"",
    ) -> None:
        """Make blocks `first` .. `last`-1 of a request findable, once their content is written."""
        if not self.enabled:
            return
        self.extend_hashes(hashes, token_ids, last, salt)
        for i in range(first, last):
            self.pool.set_hash(block_ids[i], hashes[i])
