"""Prefix hits on the paths where other engines go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zipage.engine.request import RequestStatus

from .fake_engine import FakeEngine, make_engine
from .solo import Ask, prompt

B = 4


def cached(engine: FakeEngine, name: str) -> int:
    """Prompt tokens a request found in the prefix cache when it was first admitted."""
    request = engine.ended.get(name) or engine.scheduler.requests[name]
    assert request.cached_prompt_tokens is not None
    return request.cached_prompt_tokens


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 5 * B])
def test_a_prompt_sent_twice_recomputes_its_last_token(length: int) -> None:
    engine = make_engine()
    for name in ("first", "second"):
        engine.add(name, Ask(prompt(length), max_tokens=6))
        plan = engine.step()
        hits = cached(engine, name)
        assert hits == (0 if name == "first" else (length - 1) // B * B)
        assert plan.num_tokens == length - hits > 0
        engine.run()


@pytest.mark.parametrize("window", [1, 2, B])
@pytest.mark.parametrize("length", [2 * B - 1, 2 * B, 2 * B + 1, 3 * B, 5 * B, 5 * B + 1])
def test_a_hit_leaves_the_window_to_be_computed(length: int, window: int) -> None:
    engine = make_engine()
    ask = Ask(prompt(length), max_tokens=30, max_blocks=2, window=window)
    for name in ("first", "second"):
        engine.add(name, ask)
        engine.step()
        trigger = max(2 * B, length)
        most = min(length - 1, trigger - window) // B * B
        assert cached(engine, name) <= most
        engine.run()
    assert cached(engine, "second") == most
    assert engine.ended["second"].compressions > 2


@pytest.mark.parametrize("wanted", [0, 1, B, 2 * B + 1, 5 * B, None])
def test_a_hit_leaves_the_positions_whose_logits_are_wanted(wanted: int | None) -> None:
    engine = make_engine()
    for name in ("first", "second"):
        request = engine.add(name, Ask(prompt(5 * B), max_tokens=3))
        request.next_prompt_logits = wanted
        engine.run()
    most = 5 * B - 1 if wanted is None else min(wanted, 5 * B - 1)
    assert cached(engine, "second") == most // B * B


def test_generated_text_is_found_again() -> None:
    engine = make_engine()
    engine.add("first", Ask(prompt(5), max_tokens=20))
    engine.run()
    answer = tuple(engine.ended["first"].token_ids)
    engine.add("follow-up", Ask((*answer, 1, 2, 3), max_tokens=3))
    engine.run()
    # The last generated token was never written, so the block that ends with it is not there.
    assert cached(engine, "follow-up") == (len(answer) - 1) // B * B


def test_compressed_blocks_are_never_found() -> None:
    engine = make_engine(num_blocks=3)
    engine.add("first", Ask(prompt(6), max_tokens=40, max_blocks=3))
    engine.run()
    assert engine.ended["first"].compressions > 3
    engine.add("second", Ask(tuple(engine.ended["first"].token_ids[:12]), max_tokens=1))
    engine.run()
    assert cached(engine, "second") == 0


@pytest.mark.parametrize("abort_step", [0, 1, 5])
@pytest.mark.parametrize("max_blocks", [None, 2])
def test_identical_prompts_in_one_step_one_aborted(abort_step: int, max_blocks: int | None) -> None:
    engine = make_engine()
    asks = [Ask(prompt(3 * B), max_tokens=20, max_blocks=max_blocks, seed=i) for i in range(3)]
    for i, ask in enumerate(asks):
        engine.add(f"r{i}", ask)
    for _ in range(abort_step):
        engine.step()
    engine.abort("r0")
    engine.run()
    assert engine.reasons == {"r0": "aborted", "r1": "finished", "r2": "finished"}
    engine.add("later", asks[0])
    engine.run()
    assert cached(engine, "later") > 0


def test_abort_in_mid_prefill_then_the_same_prefix_again() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.add("first", Ask(prompt(30), max_tokens=5))
    engine.step()
    engine.step()
    assert engine.scheduler.requests["first"].num_computed == 12
    engine.abort("first")
    assert engine.pool.num_owned == 0
    engine.add("second", Ask(prompt(30), max_tokens=5))
    engine.run()
    assert cached(engine, "second") == 12


def test_abort_between_two_chunks_leaves_no_half_block() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.add("first", Ask(prompt(30), max_tokens=5))
    engine.step()
    engine.abort("first")
    assert engine.pool.num_cached == 1, "six tokens are one full block and a half"
    engine.add("second", Ask(prompt(30), max_tokens=5))
    engine.run()
    assert cached(engine, "second") == B


@pytest.mark.parametrize("max_blocks", [None, 3])
def test_prefix_cache_off_with_three_chunks_and_one_token(max_blocks: int | None) -> None:
    chunk = 8
    engine = make_engine(enable_prefix_caching=False, max_num_batched_tokens=chunk)
    ask = Ask(prompt(3 * chunk + 1), max_tokens=12, max_blocks=max_blocks)
    engine.add("first", ask)
    sizes = [engine.step().num_tokens for _ in range(4)]
    assert sizes == [chunk, chunk, chunk, 1]
    assert engine.scheduler.requests["first"].num_output_tokens == 1
    engine.run()
    engine.add("second", ask)
    engine.run()
    assert cached(engine, "second") == 0 and engine.pool.num_cached == 0


def test_prefix_hit_after_preemption() -> None:
    engine = make_engine(num_blocks=10, admission="optimistic")
    engine.add("old", Ask(prompt(8, seed=1), max_tokens=16))
    engine.add("young", Ask(prompt(8, seed=2), max_tokens=20))
    young = engine.scheduler.requests["young"]
    while not young.preemptions:
        engine.step()
    assert young.status is RequestStatus.WAITING and len(young.token_ids) == 21
    while young.status is RequestStatus.WAITING:
        plan = engine.step()
    computed = next(s.num_tokens for s in plan.scheduled if s.request is young)
    # Five blocks were released, and the older request took the deepest.
    assert computed == 21 - 4 * B
    engine.run()
    assert young.cached_prompt_tokens == 0, "the hit of a recomputation is not the prompt's"


def test_eight_requests_share_a_long_prefix_above_their_budget() -> None:
    """Each redirects its compression; the shared blocks stay clean for later requests."""
    shared = prompt(10 * B)
    engine = make_engine(num_blocks=100, num_query_slots=8)
    engine.add("first", Ask((*shared, 1), max_tokens=1))
    engine.run()
    for i in range(8):
        engine.add(f"r{i}", Ask((*shared, i), max_tokens=60, max_blocks=4, seed=i))
    engine.run()
    assert all(cached(engine, f"r{i}") >= 9 * B for i in range(8))
    assert all(engine.ended[f"r{i}"].compressions > 10 for i in range(8))
    engine.add("later", Ask((*shared, 99), max_tokens=10))
    engine.run()
    assert cached(engine, "later") == 10 * B


def test_a_lone_owner_without_room_gives_up_its_deepest_blocks_first() -> None:
    """What the pool cannot spare at a compression is taken from the end of the prompt, so that
    what remains can still be found."""
    engine = make_engine(num_blocks=8)
    ask = Ask(prompt(6 * B), max_tokens=10, max_blocks=5)
    engine.add("first", ask)
    engine.run()
    engine.add("second", Ask(prompt(6 * B), max_tokens=1))
    engine.run()
    assert cached(engine, "second") > 0


def test_salted_prompts_share_nothing() -> None:
    engine = make_engine()
    for salt in (b"a", b"b"):
        engine.add(salt.decode(), Ask(prompt(20), max_tokens=10, salt=salt))
        engine.run()
        assert cached(engine, salt.decode()) == 0
    engine.add("again", Ask(prompt(20), max_tokens=10, salt=b"a"))
    engine.run()
    assert cached(engine, "again") == 16


def computed(engine: FakeEngine, name: str | None = None) -> int:
    """Tokens computed so far, of one request or of all."""
    return sum(n for items in engine.schedule_log for who, n in items if name in (None, who))


def first_steps(engine: FakeEngine) -> dict[str, int]:
    """The step in which each request got its first tokens."""
    first: dict[str, int] = {}
    for step, items in enumerate(engine.schedule_log):
        for name, _ in items:
            first.setdefault(name, step)
    return first


@pytest.mark.parametrize("batch", [3, 8, 256])
@pytest.mark.parametrize("max_blocks", [None, 3])
@pytest.mark.parametrize("length", [1, B, 3 * B - 1, 3 * B, 3 * B + 1, 7 * B])
def test_equal_prompts_at_once_are_computed_once(
    length: int, max_blocks: int | None, batch: int
) -> None:
    engine = make_engine(max_num_batched_tokens=batch, num_query_slots=8)
    for i in range(8):
        engine.add(f"r{i}", Ask(prompt(length), max_tokens=12, max_blocks=max_blocks, seed=i))
    engine.run()
    most = length - 1
    if max_blocks is not None:
        most = min(most, max(length, 3 * B) - 2)
    shared = most // B * B
    assert [cached(engine, f"r{i}") for i in range(8)] == [0] + [shared] * 7
    assert computed(engine) == length + 7 * (length - shared) + 8 * 11


def test_without_a_prefix_cache_nobody_waits() -> None:
    engine = make_engine(enable_prefix_caching=False)
    for i in range(4):
        engine.add(f"r{i}", Ask(prompt(3 * B), max_tokens=2, seed=i))
    assert engine.step().num_tokens == 4 * 3 * B
    engine.run()


def test_each_part_of_a_prefix_has_one_who_computes_it() -> None:
    engine = make_engine()
    text = prompt(12 * B)
    engine.add("long", Ask(text, max_tokens=1))
    for i in range(2):
        engine.add(f"a{i}", Ask((*text[:B], *prompt(B, seed=3), i), max_tokens=1, seed=i))
    engine.add("b", Ask((*text[:B], *prompt(B, seed=4)), max_tokens=1))
    engine.run()
    assert first_steps(engine) == {"long": 0, "a0": 1, "b": 1, "a1": 2}
    assert [cached(engine, name) for name in ("long", "a0", "b", "a1")] == [0, B, B, 2 * B]


def test_another_takes_over_from_one_that_is_aborted() -> None:
    engine = make_engine(max_num_batched_tokens=B)
    for i in range(4):
        engine.add(f"r{i}", Ask(prompt(20), max_tokens=5, seed=i))
    engine.step()
    engine.abort("r0")
    engine.run()
    assert engine.reasons == {"r0": "aborted"} | {f"r{i}": "finished" for i in range(1, 4)}
    assert [cached(engine, f"r{i}") for i in range(4)] == [0, B, 16, 16]


def test_a_step_that_fails_leaves_nobody_with_blocks_that_were_not_written() -> None:
    """The first of four equal prompts ends in its step: nobody had relied on it."""
    engine = make_engine()
    for i in range(4):
        engine.add(f"r{i}", Ask(prompt(20), max_tokens=5, seed=i))
    plan = engine.scheduler.schedule()
    assert [item.request.request_id for item in plan.scheduled] == ["r0"]
    engine.abort("r0")
    assert engine.pool.num_available == engine.pool.num_blocks
    engine.run()
    assert [cached(engine, f"r{i}") for i in range(1, 4)] == [0, 16, 16]


def test_who_waits_for_a_prefix_does_not_hold_up_others_and_keeps_its_row() -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=3)
    for i in range(2):
        engine.add(f"s{i}", Ask(prompt(30), max_tokens=9, seed=i))
    for i in range(2):
        engine.add(f"other{i}", Ask(prompt(3, seed=5 + i), max_tokens=3))
    engine.run()
    assert first_steps(engine) == {"s0": 0, "other0": 0, "s1": 1, "other1": 3}


@pytest.mark.parametrize("why", ["salt", "logits", "priority"])
def test_who_can_not_or_need_not_wait_does_not(why: str) -> None:
    engine = make_engine(max_num_batched_tokens=256)
    engine.add("first", Ask(prompt(20), max_tokens=2))
    options = {"salt": {"salt": b"x"}, "priority": {"priority": -1}}.get(why, {})
    if why == "priority":
        # Already computing its prompt, in small chunks, when somebody comes that goes before it.
        limits = engine.config
        engine.scheduler.config = replace(limits, max_num_batched_tokens=2)
        engine.step()
        engine.scheduler.config = limits
    request = engine.add("second", Ask(prompt(20), max_tokens=2, **options))  # type: ignore[arg-type]
    if why == "logits":
        request.next_prompt_logits = 0
    engine.step()
    assert ("second", 20) in engine.schedule_log[-1]
    engine.run()


def test_nobody_waits_for_a_request_that_waits_itself() -> None:
    """One that stands still for want of a query slot computes nothing that could be waited for."""
    engine = make_engine(num_query_slots=1)
    engine.add("holder", Ask(prompt(2 * B - 2, seed=9), max_tokens=3 * B, max_blocks=2, window=4))
    engine.step()
    engine.add("still", Ask(prompt(2 * B), max_tokens=3 * B, max_blocks=2, window=4))
    engine.step()
    still = engine.scheduler.requests["still"]
    assert still.length == B and still.query_slot is None
    engine.add("free", Ask(prompt(2 * B), max_tokens=2))
    engine.step()
    assert ("free", B) in engine.schedule_log[-1]
    engine.run()
