"""Moving the cache of a compressed request to host memory and back, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zipage.cache.kv_cache import KVCache


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
        index = torch.tensor(block_ids, device=c.kv.device)
        self._store[request_id] = _SwappedCache(
            kv=c.kv.index_select(1, index).cpu(),
            scores=c.scores.index_select(1, index).cpu(),
            positions=c.positions.index_select(1, index).cpu(),
            queries=None if query_slot is None else c.queries[:, query_slot].cpu().clone(),
        )

    def swap_in(self, request_id: str, block_ids: tuple[int, ...], query_slot: int | None) -> None:
        """Copy a request back, into these blocks and this query slot."""
        c = self._cache
        saved = self._store[request_id]
        device = c.kv.device
        index = torch.tensor(block_ids, device=device)
        c.kv.index_copy_(1, index, saved.kv.to(device))
        c.scores.index_copy_(1, index, saved.scores.to(device))
        c.positions.index_copy_(1, index, saved.positions.to(device))
        if saved.queries is not None and query_slot is not None:
            c.queries[:, query_slot].copy_(saved.queries)
        del self._store[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a swapped request that ended."""
        self._store.pop(request_id, None)
