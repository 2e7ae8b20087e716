"""Moving the cache of a compressed request to host memory and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zipage.cache.kv_cache import KVCache

#: Device memory a move takes besides the pool, unless a single layer needs more.
_STAGING_BYTES = 64 << 20


@dataclass
class _SwappedCache:
    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor | None


class HostSwap:
    """Host copies of swapped requests, by request id."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._store: dict[str, _SwappedCache] = {}

    def __len__(self) -> int:
        return len(self._store)

    def swap_out(self, request_id: str, block_ids: tuple[int, ...], query_slot: int | None) -> None:
        """Copy blocks, their scores and positions, and a query slot's content to the host."""
        c = self._cache
        self._store[request_id] = _SwappedCache(
            kv=_gather(c.kv_bits, block_ids),
            scores=_gather(c.scores, block_ids),
            positions=_gather(c.positions, block_ids),
            queries=None if query_slot is None else c.queries[:, query_slot].cpu().clone(),
        )

    def swap_in(self, request_id: str, block_ids: tuple[int, ...], query_slot: int | None) -> None:
        """Copy a request back, into these blocks and this query slot."""
        c = self._cache
        saved = self._store[request_id]
        _scatter(c.kv_bits, block_ids, saved.kv)
        _scatter(c.scores, block_ids, saved.scores)
        _scatter(c.positions, block_ids, saved.positions)
        if saved.queries is not None and query_slot is not None:
            c.queries[:, query_slot].copy_(saved.queries)
        del self._store[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a swapped request that ended."""
        self._store.pop(request_id, None)

    def close(self) -> None:
        """Forget all requests and the pool; nothing can be moved afterwards."""
        self._store.clear()
        self.__dict__.pop("_cache", None)


def _gather(pool: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
    """Blocks of ``[L, N, ...]`` on the host, ``[L, n, ...]``."""
    index = torch.tensor(block_ids, device=pool.device)
    saved = pool.new_empty((len(pool), len(index), *pool.shape[2:]), device="cpu")
    step = _layers_at_once(saved)
    for some, to in zip(torch.split(pool, step), torch.split(saved, step), strict=True):
        to.copy_(some.index_select(1, index))
    return saved


def _scatter(pool: torch.Tensor, block_ids: Sequence[int], saved: torch.Tensor) -> None:
    """The inverse of `_gather`."""
    index = torch.tensor(block_ids, device=pool.device)
    step = _layers_at_once(saved)
    for some, of in zip(torch.split(pool, step), torch.split(saved, step), strict=True):
        some.index_copy_(1, index, of.to(pool.device))


def _layers_at_once(saved: torch.Tensor) -> int:
    return max(1, _STAGING_BYTES * len(saved) // max(1, saved.nbytes))
