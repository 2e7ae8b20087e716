"""Who makes way when blocks run out, and that nothing is lost by it."""

from __future__ import annotations

import pytest

from zipage.engine.request import Request, RequestStatus

from .fake_engine import FakeEngine, make_engine
from .solo import Ask, prompt

B = 4


def until_preempted(engine: FakeEngine, requests: list[Request]) -> list[str]:
    """Step until somebody is preempted; the names of all who were."""
    while not any(r.preemptions for r in requests):
        engine.step()
    return [r.request_id for r in requests if r.preemptions]


def test_the_newest_uncompressed_request_goes_first() -> None:
    engine = make_engine(num_blocks=8, admission="optimistic")
    requests = [engine.add(f"r{i}", Ask(prompt(6, seed=i), max_tokens=20)) for i in range(3)]
    assert until_preempted(engine, requests) == ["r2"]
    engine.run()


def test_a_request_with_a_slot_is_preempted_after_those_without() -> None:
    engine = make_engine(num_blocks=6, admission="optimistic")
    old = engine.add("old", Ask(prompt(7, seed=1), max_tokens=10))
    plain = engine.add("plain", Ask(prompt(1, seed=2), max_tokens=5))
    holder = engine.add("holder", Ask(prompt(9, seed=3), max_tokens=9, max_blocks=3, window=4))
    engine.step()
    assert holder.query_slot is not None
    assert until_preempted(engine, [old, plain, holder]) == ["plain"]
    engine.run()


def test_a_compressed_request_is_preempted_last() -> None:
    engine = make_engine(num_blocks=9, admission="optimistic", enable_prefix_caching=False)
    old = engine.add("old", Ask(prompt(6, seed=1), max_tokens=30))
    plain = engine.add("plain", Ask(prompt(4, seed=2), max_tokens=30))
    small = engine.add("small", Ask(prompt(8, seed=3), max_tokens=60, max_blocks=2))
    assert until_preempted(engine, [old, plain, small]) == ["plain"]
    assert small.compressed
    while not small.preemptions:
        engine.step()
    assert small.status is RequestStatus.SWAPPED and old.preemptions == 0
    engine.run()
    assert small.swaps >= 1 and engine.scheduler.counters.preemptions_swap >= 1


@pytest.mark.parametrize("style", ["stable", "holes"])
@pytest.mark.parametrize("steps_after", [0, 1, B - 1, B])
def test_preemption_after_a_compression_swaps_exactly(steps_after: int, style: str) -> None:
    """A compressed request can't be recomputed from its text: cache, stored scores and a partly
    filled query slot travel to host memory and back."""
    engine = make_engine(
        num_blocks=6, compaction=style, admission="optimistic", enable_prefix_caching=False
    )
    small = engine.add("small", Ask(prompt(8), max_tokens=40, max_blocks=2, window=B, priority=1))
    while not small.compressed:
        engine.step()
    for _ in range(steps_after):
        engine.step()
    engine.add("urgent", Ask(prompt(5 * B, seed=4), max_tokens=4, priority=0))
    # The scheduler never lets a newcomer preempt; the growth of an older request does.
    while not small.swaps and engine.scheduler.has_unfinished:
        if small.status is RequestStatus.RUNNING and "filler" not in engine.scheduler.requests:
            engine.add("filler", Ask(prompt(3, seed=5), max_tokens=20, priority=-1))
        engine.step()
    assert small.swaps, "never preempted"
    engine.run()
    assert small.compressions > 5


def test_a_request_swapped_out_with_its_slot_waits_for_a_slot_to_return() -> None:
    engine = make_engine(
        num_blocks=5, num_query_slots=1, admission="optimistic", enable_prefix_caching=False
    )
    old = engine.add("old", Ask(prompt(8, seed=1), max_tokens=12))
    small = engine.add("small", Ask(prompt(8, seed=2), max_tokens=40, max_blocks=2, window=B))
    while small.status is not RequestStatus.SWAPPED:
        engine.step()
    assert engine.swapped["small"][2] is not None, "its window is partly collected"
    engine.add("urgent", Ask(prompt(9, seed=3), max_tokens=20, max_blocks=3, window=B, priority=-1))
    engine.abort("old")
    assert old.status is RequestStatus.FINISHED
    engine.step()
    urgent = engine.scheduler.requests["urgent"]
    while urgent.query_slot is not None and urgent.status is RequestStatus.RUNNING:
        assert small.status is RequestStatus.SWAPPED and engine.pool.num_available >= 2
        engine.step()
    assert engine.steps > 10
    engine.run()
    assert small.swaps >= 1 and small.compressions > 5


def test_a_swapped_request_that_is_aborted_leaves_host_memory() -> None:
    engine = make_engine(num_blocks=6, admission="optimistic", enable_prefix_caching=False)
    engine.add("old", Ask(prompt(4, seed=1), max_tokens=20))
    small = engine.add("small", Ask(prompt(8, seed=2), max_tokens=60, max_blocks=2))
    while small.status is not RequestStatus.SWAPPED:
        engine.step()
    assert "small" in engine.swapped
    engine.abort("small")
    assert not engine.swapped
    engine.run()


def test_the_oldest_request_is_never_preempted() -> None:
    engine = make_engine(num_blocks=10, admission="optimistic", num_query_slots=1)
    requests = [
        engine.add(f"r{i}", Ask(prompt(8, seed=i), max_tokens=31, max_blocks=(None, 3)[i % 2]))
        for i in range(6)
    ]
    engine.run()
    assert requests[0].preemptions == 0
    assert sum(r.preemptions for r in requests) > 3


def test_a_stall_is_resolved_by_the_newest_making_way() -> None:
    """Two requests block each other: the older one waits for the only slot, whose holder waits
    for a block."""
    engine = make_engine(
        num_blocks=6, num_query_slots=1, admission="optimistic", enable_prefix_caching=False
    )
    old = engine.add("old", Ask(prompt(9, seed=1), max_tokens=30, max_blocks=4, window=4))
    young = engine.add("young", Ask(prompt(11, seed=2), max_tokens=30, max_blocks=4, window=4))
    engine.run()
    assert engine.scheduler.counters.stalls_resolved >= 1
    assert young.preemptions >= 1 and old.preemptions == 0


def test_cached_blocks_are_dropped_before_anybody_is_preempted() -> None:
    engine = make_engine(num_blocks=10)
    engine.add("past", Ask(prompt(8 * B, seed=9), max_tokens=1))
    engine.run()
    assert engine.pool.num_cached == 8
    a = engine.add("a", Ask(prompt(6, seed=1), max_tokens=14))
    b = engine.add("b", Ask(prompt(6, seed=2), max_tokens=14))
    engine.run()
    assert a.preemptions == b.preemptions == 0
