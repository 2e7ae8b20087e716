"""The job that the planner hands to the compressor: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompressionJob:
    """Compress the cache of one request.

    Attributes:
        request_id: the request that owns the cache.
        source_blocks: blocks that hold the cached tokens, in slot order.
        target_blocks: blocks that hold the survivors afterwards, in slot order. Entry i is either
            ``source_blocks[i]``, written in place, or a block that is not a source block.
        length: T, cached tokens before.
        keep: tokens kept per layer and KV head, ``len(target_blocks) * block_size`` and < T.
        query_slot: the query slot that holds the last `window` queries.
        num_scored: leading slots that already carry stored scores and positions
            (0 at the first compression, `keep` of the previous one later).
        num_tokens: text tokens written so far. Slot t >= num_scored holds the token at text
            position ``num_tokens - length + t``; slots below have theirs in the position store.
        prompt_len: tokens of the prompt.
        compression_index: how many compressions this request had before.
        report_kept: whether the text positions of the survivors are reported.
    """

    request_id: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    length: int
    keep: int
    query_slot: int
    num_scored: int
    num_tokens: int
    prompt_len: int
    compression_index: int
    report_kept: bool = False
