"""Which tokens compressions kept, found by their keys instead of by the position store."""

from __future__ import annotations

from typing import Any

import torch

from zipage import LLM
from zipage.compression.job import CompressionJob


class KeptReference:
    """Watches the compressions of an engine.

    Before each, it notes which key every layer and head holds for which text position; keys are
    unique as they are rotated by the position. After it, the keys in the target blocks tell which
    positions are left.

    Attributes:
        kept: for each sequence, per compression: `num_tokens` and ``[L, H, keep]`` positions.
    """

    def __init__(self, llm: LLM) -> None:
        runner = llm.engine.core.runner
        self._cache = runner.cache
        self._inner = runner.compress
        self.kept: dict[str, list[tuple[int, torch.Tensor]]] = {}
        runner.compress = self._compress  # type: ignore[method-assign]

    def _keys(self, blocks: tuple[int, ...]) -> torch.Tensor:
        keys = self._cache.kv[:, list(blocks), 0]  # [L, n, H, b, D]
        return keys.transpose(1, 2).flatten(2, 3)  # [L, H, n * b, D]

    def _compress(self, job: CompressionJob) -> Any:
        earlier = self.kept.setdefault(job.request_id, [])
        layers, heads = self._cache.spec.num_layers, self._cache.spec.num_kv_heads
        first = job.num_tokens - job.length
        positions = torch.arange(first, job.num_tokens).expand(layers, heads, -1).clone()
        assert job.num_scored == (len(earlier[-1][1][0, 0]) if earlier else 0)
        if earlier:
            positions[..., : job.num_scored] = earlier[-1][1]
        keys = self._keys(job.source_blocks)[..., : job.length, :]
        result = self._inner(job)
        left = self._keys(job.target_blocks)
        found = torch.empty(layers, heads, job.keep, dtype=torch.int64)
        for layer in range(layers):
            for head in range(heads):
                owner = {
                    key.numpy().tobytes(): int(position)
                    for key, position in zip(keys[layer, head], positions[layer, head], strict=True)
                }
                assert len(owner) == job.length, "two tokens with one key"
                for slot, key in enumerate(left[layer, head]):
                    found[layer, head, slot] = owner[key.numpy().tobytes()]
        earlier.append((job.num_tokens, found))
        return result

    def keepers(self, sequence_id: str) -> list[list[int]]:
        """Per compression: for each text position, how many lists hold it."""
        counted = []
        for num_tokens, positions in self.kept[sequence_id]:
            counts = [0] * num_tokens
            for position in positions.flatten().tolist():
                counts[position] += 1
            counted.append(counts)
        return counted

    def layer_positions(self, sequence_id: str) -> list[list[int]]:
        """Per compression: for each layer, how many positions some head holds."""
        return [
            [len(set(layer.flatten().tolist())) for layer in positions]
            for _, positions in self.kept[sequence_id]
        ]
