"""One sequence being generated, as the scheduler sees it."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from zipage.outputs import RequestMetrics

#: What `time.perf_counter` counts from, in seconds since the epoch.
EPOCH = time.time() - time.perf_counter()

#: Placeholder in `Request.token_ids` for a token sampled on the device and not read yet.
PENDING_TOKEN = -1


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # not admitted yet, or preempted and to be recomputed
    SWAPPED = "swapped"  # preempted; its cache lies in host memory
    RUNNING = "running"  # owns blocks, may be scheduled
    COMPRESSING = "compressing"  # owns blocks, its compression is in flight
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """State of one sequence.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: the prompt.
        max_tokens: most tokens to generate, resolved against the model length.
        max_blocks: N_max, most blocks owned once compressed; None for full KV.
        window: w, tokens whose queries score the cache.
        priority: lower runs earlier, as in vLLM.
        bounded_prefill: compress between the chunks of a prompt longer than the budget.
        salt: part of the prefix hash.
        next_prompt_logits: first prompt position whose logits the layer above has yet to read; the
            tokens from there on are computed even if the prefix cache holds them. None if there is
            no such position.
        report_kept: whether its compressions report the text positions they kept.
        external_id: the submitter's id of the request it belongs to, for logs.
        payload: whatever the layer above attaches; the scheduler does not look at it.
        arrival_index: how many requests were submitted before it.
        token_ids: prompt and generated tokens; the last one may be `PENDING_TOKEN`.
        num_computed: text tokens whose keys and values were written (some may since be evicted).
        length: valid cache slots; equal to `num_computed` until the first compression.
        block_ids: its block table.
        block_hashes: prefix hashes of its first full blocks, computed as needed.
        table_version: incremented whenever `block_ids` changes other than by appending.
        row: its row in the runner's block tables; -1 while it is not running.
        query_slot: where its window's queries are stored; None without a lease.
        num_scored: number of first cached tokens that have a stored score.
        aborted: it ends as soon as its compression has ended.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    block_size: int
    max_blocks: int | None = None
    window: int = 16
    priority: int = 0
    bounded_prefill: bool = False
    salt: bytes = b""
    next_prompt_logits: int | None = None
    report_kept: bool = False
    external_id: str | None = None
    payload: Any = None

    arrival_index: int = 0
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    length: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    table_version: int = 0
    row: int = -1
    query_slot: int | None = None
    num_scored: int = 0
    aborted: bool = False

    arrival_time: float = field(default_factory=time.perf_counter)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_time: float | None = None
    compressions: int = 0
    evicted_tokens: int = 0
    compression_seconds: float = 0.0
    peak_blocks: int = 0
    preemptions: int = 0
    swaps: int = 0
    cached_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)
        #: Most tokens ever written to the cache; the last generated token is never written.
        self.max_written = self.prompt_len + self.max_tokens - 1
        self._capacity = None if self.max_blocks is None else self.max_blocks * self.block_size
        self.trigger = self._trigger()

    def _trigger(self) -> int | None:
        """Cache length at which the next write needs a compression; None if it is never reached."""
        if self._capacity is None:
            return None
        first = not self.compressions and not self.bounded_prefill
        trigger = max(self._capacity, self.prompt_len) if first else self._capacity
        remaining = self.max_written - self.num_computed + self.length
        return trigger if remaining > trigger else None

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: smaller runs first and is preempted last."""
        return (self.priority, self.arrival_index)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Known tokens not yet written to the cache: 1 while decoding, more in prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def compressed(self) -> bool:
        """Whether tokens were evicted, so that the cache can't be recomputed from the text."""
        return self.compressions > 0

    @property
    def compression_due(self) -> bool:
        """Whether the next token can't be written before a compression."""
        return self.trigger is not None and self.length >= self.trigger and self.num_pending > 0

    @property
    def worst_case_blocks(self) -> int:
        """Most blocks this request ever needs at once.

        During its first compression it may briefly own more: new target blocks that replace
        shared ones.
        """
        b = self.block_size
        full = -(-self.max_written // b)
        if self.max_blocks is None:
            return full
        if self.compressed or self.bounded_prefill:
            return min(full, self.max_blocks)
        return min(full, max(self.max_blocks, -(-self.prompt_len // b)))

    @property
    def log_fields(self) -> dict[str, Any]:
        """Structured fields of a log message about this request."""
        return {
            "request_id": self.external_id or self.request_id,
            "sequence_id": self.request_id,
        }

    def metrics(self) -> RequestMetrics:
        """Times and KV cache events, up to now if it has not ended."""
        arrival, started = self.arrival_time, self.first_scheduled_time
        first, last = self.first_token_time, self.last_token_time
        # With steps scheduled ahead, a request that ends by length leaves the scheduler before its
        # last token is known.
        end = max(self.finish_time or time.perf_counter(), last or 0.0)
        rate = 0.0
        if first is not None and end > first and self.num_output_tokens > 1:
            rate = (self.num_output_tokens - 1) / (end - first)
        return RequestMetrics(
            queue_time=(started or end) - arrival,
            time_to_first_token=None if first is None else first - arrival,
            e2e_time=end - arrival,
            tokens_per_second=rate,
            compressions=self.compressions,
            evicted_tokens=self.evicted_tokens,
            peak_blocks=self.peak_blocks,
            preemptions=self.preemptions,
            swaps=self.swaps,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
            arrival_time=EPOCH + arrival,
            prefill_time=None if first is None or started is None else first - started,
            decode_time=0.0 if first is None or last is None else last - first,
            compression_time=self.compression_seconds,
        )

    def set_blocks(self, block_ids: list[int]) -> None:
        """Replace the block table."""
        self.block_ids = block_ids
        self.table_version += 1

    def on_compressed(self, target_blocks: list[int], keep: int) -> None:
        """Take over the result of a compression: `keep` tokens in `target_blocks`."""
        self.evicted_tokens += self.length - keep
        self.length = keep
        self.num_scored = keep
        self.compressions += 1
        self.block_hashes.clear()
        self.set_blocks(target_blocks)
        self.trigger = self._trigger()

    def reset_cache(self) -> None:
        """Forget the cache after a preemption by recomputation."""
        self.num_computed = 0
        self.length = 0
        self.set_blocks([])
        self.trigger = self._trigger()
