"""When compressions happen, what they own, and what they leave when they end, fail or stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zipage.engine.request import RequestStatus

from .fake_engine import FakeEngine, make_engine
from .solo import Ask, prompt, solo_run

B = 4


def until_compressing(engine: FakeEngine, name: str) -> None:
    """Step until the compression of a request is in flight."""
    while name not in engine.in_flight:
        engine.step()


@pytest.mark.parametrize("style", ["stable", "holes"])
@pytest.mark.parametrize("bounded_prefill", [False, True])
@pytest.mark.parametrize("length", [1, 3 * B - 1, 3 * B, 3 * B + 1, 6 * B, 6 * B + 1])
def test_a_request_never_exceeds_its_budget_once_compressed(
    length: int, bounded_prefill: bool, style: str
) -> None:
    engine = make_engine(compaction=style, max_num_batched_tokens=7, enable_prefix_caching=False)
    request = engine.add(
        "r", Ask(prompt(length), max_tokens=50, max_blocks=3, bounded_prefill=bounded_prefill)
    )
    while engine.scheduler.has_unfinished:
        engine.step()
        if request.compressed or bounded_prefill or length <= 3 * B:
            assert len(request.block_ids) <= 3
        assert len(request.block_ids) <= max(3, -(-length // B))
    engine.check_texts()
    assert request.peak_blocks == (3 if bounded_prefill else max(3, -(-length // B)))
    # After the first compression, every further one evicts a block.
    first = 3 * B if bounded_prefill else max(3 * B, length)
    written = length + 50 - 1
    assert request.compressions == 1 + (written - first - 1) // B
    assert request.evicted_tokens == (first - 2 * B) + (request.compressions - 1) * B


@pytest.mark.parametrize("extra", [0, 1])
def test_a_request_that_just_fits_its_budget_is_not_compressed(extra: int) -> None:
    engine = make_engine()
    # The last generated token is never written: 3 blocks hold one token more than 3 * B.
    ask = Ask(prompt(5), max_tokens=3 * B - 5 + 1 + extra, max_blocks=3)
    engine.add("r", ask)
    engine.run()
    assert engine.ended["r"].compressions == extra
    full, _ = solo_run(replace(ask, max_blocks=None), B, "stable")
    assert (engine.ended["r"].token_ids == full) == (extra == 0)


@pytest.mark.parametrize("style", ["stable", "holes"])
@pytest.mark.parametrize("delay", [0, 1, 5])
def test_compression_while_chunks_of_another_prompt_run(delay: int, style: str) -> None:
    engine = make_engine(delay=delay, compaction=style, max_num_batched_tokens=6)
    engine.add("small", Ask(prompt(8, seed=1), max_tokens=30, max_blocks=2))
    engine.add("large", Ask(prompt(90, seed=2), max_tokens=5, max_blocks=4))
    overlapped = 0
    while engine.scheduler.has_unfinished:
        before = engine.scheduler.counters.compressions
        plan = engine.step()
        chunk = any(s.request.request_id == "large" and not s.samples for s in plan.scheduled)
        compressing = bool(engine.in_flight) or engine.scheduler.counters.compressions > before
        overlapped += chunk and compressing
    assert overlapped > 2
    engine.check_drained()
    engine.check_texts()


def test_requests_under_compression_skip_steps_and_the_others_do_not() -> None:
    engine = make_engine(delay=10)
    engine.add("a", Ask(prompt(8, seed=1), max_tokens=10, max_blocks=2))
    engine.add("b", Ask(prompt(3, seed=2), max_tokens=30))
    until_compressing(engine, "a")
    for _ in range(8):
        assert [name for name, _ in engine.schedule_log[-1]] == ["b"]
        engine.step()
    engine.run()


@pytest.mark.parametrize("shared", [False, True])
def test_abort_during_a_compression_returns_its_blocks_when_it_ends(shared: bool) -> None:
    engine = make_engine(delay=5)
    engine.add("a", Ask(prompt(12), max_tokens=30, max_blocks=3))
    if shared:
        engine.step()
        engine.add("b", Ask(prompt(12), max_tokens=30, max_blocks=3, seed=1))
    until_compressing(engine, "a")
    a = engine.scheduler.requests["a"]
    owned = set(a.block_ids) | set(engine.scheduler.jobs["a"].target_blocks)
    engine.abort("a")
    assert "a" not in engine.ended
    assert all(engine.pool.ref_count(b) for b in owned), "the compression still writes to them"
    assert engine.scheduler.abort("a") is None, "a second abort does nothing"
    while "a" not in engine.ended:
        engine.step()
    assert engine.reasons["a"] == "aborted"
    assert not shared or engine.pool.num_owned > 0
    engine.run()


@pytest.mark.parametrize("delay", [0, 3])
def test_a_failed_compression_ends_its_request_only(delay: int) -> None:
    engine = make_engine(delay=delay)
    failures = iter([True])
    engine.fails = lambda: next(failures, False)
    shared = prompt(12)
    engine.add("a", Ask(shared, max_tokens=30, max_blocks=3))
    engine.add("b", Ask((*shared[:8], 1, 2), max_tokens=30, max_blocks=3))
    engine.run()
    assert engine.reasons == {"a": "failed", "b": "finished"}
    assert engine.ended["a"].status is RequestStatus.FINISHED


@pytest.mark.parametrize("style", ["finished", "failed", "aborted"])
def test_a_compression_that_waits_for_one_that_ends_in_the_same_step(style: str) -> None:
    """Two requests share a block and are due at once; the last free block goes to the older one,
    and the younger one may be all that is left when the step is scheduled."""
    engine = make_engine(num_blocks=4)
    engine.fails = lambda: style == "failed" and "a" not in engine.ended
    engine.add("a", Ask(prompt(5), max_tokens=12, max_blocks=2, window=1))
    engine.step()
    engine.add("b", Ask((*prompt(4), 1, 2), max_tokens=12, max_blocks=2, window=1))
    if style == "aborted":
        engine.between = lambda: engine.abort("a") if "a" in engine.in_flight else None
    engine.run()
    assert engine.reasons == {"a": style, "b": "finished"}
    assert engine.ended["b"].compressions > 1 and engine.ended["b"].preemptions == 0


def test_an_aborted_request_whose_compression_fails_ends_once() -> None:
    engine = make_engine(delay=3)
    engine.fails = lambda: True
    engine.add("a", Ask(prompt(12), max_tokens=30, max_blocks=3))
    until_compressing(engine, "a")
    engine.abort("a")
    engine.run()
    assert list(engine.ended) == ["a"]


def test_a_shared_block_is_replaced_and_a_private_one_is_written_in_place() -> None:
    engine = make_engine(delay=5)
    engine.add("a", Ask(prompt(8), max_tokens=20, max_blocks=4))
    engine.step()
    engine.add("b", Ask((*prompt(4), 9, 9, 9), max_tokens=40))
    until_compressing(engine, "a")
    job = engine.scheduler.jobs["a"]
    other = engine.scheduler.requests["b"].block_ids
    assert job.source_blocks[0] == other[0]
    assert job.target_blocks[0] not in job.source_blocks
    assert job.target_blocks[2] == job.source_blocks[2], "generated tokens are not worth sparing"
    assert not set(job.target_blocks) & set(other)
    engine.run()


def test_a_prompt_block_is_spared_only_while_blocks_abound() -> None:
    for num_blocks, spared in ((32, True), (3, False)):
        engine = make_engine(delay=2, num_blocks=num_blocks)
        engine.add("a", Ask(prompt(8), max_tokens=20, max_blocks=3))
        until_compressing(engine, "a")
        job = engine.scheduler.jobs["a"]
        assert (job.target_blocks[0] != job.source_blocks[0]) == spared
        engine.run()


def test_slots_are_held_only_near_a_trigger() -> None:
    window = 2
    engine = make_engine(num_query_slots=1)
    request = engine.add("a", Ask(prompt(5), max_tokens=40, max_blocks=4, window=window))
    while engine.scheduler.has_unfinished:
        engine.step()
        near = request.trigger is not None and request.length > request.trigger - window
        assert (request.query_slot is not None) == near
    assert request.compressions > 3


def test_requests_wait_in_place_for_the_only_slot() -> None:
    engine = make_engine(num_query_slots=1, delay=4)
    for i in range(5):
        engine.add(f"r{i}", Ask(prompt(6, seed=i), max_tokens=40, max_blocks=3, window=4))
    engine.run()
    counters = engine.scheduler.counters
    assert counters.preemptions_recompute == counters.preemptions_swap == 0
    # They are equal but for their age, so the first compressions come in order of age.
    assert [next(iter(engine.compressed))] == ["r0"]
    assert list(engine.compressed) == [f"r{i}" for i in range(5)]


def test_a_request_that_needs_no_slot_does_not_wait_for_one() -> None:
    engine = make_engine(num_query_slots=1, delay=50)
    engine.add("holder", Ask(prompt(8, seed=1), max_tokens=9, max_blocks=2))
    until_compressing(engine, "holder")
    engine.add("short", Ask(prompt(3, seed=2), max_tokens=5, max_blocks=2))
    while "short" not in engine.ended:
        engine.step()
    assert "holder" in engine.in_flight
    engine.run()
