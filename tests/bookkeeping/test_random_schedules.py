"""Random schedules of the bookkeeping alone: design invariants 1, 2, 3, 5, 6, and progress.

`ZIPAGE_BOOKKEEPING_SCHEDULES` sets how many; each is decided by its number, so that a failure
message is enough to run it again with `run_schedule(seed, Totals())`.
"""

from __future__ import annotations

import os

import pytest

from .random_schedules import Totals, run_schedule

SCHEDULES = int(os.environ.get("ZIPAGE_BOOKKEEPING_SCHEDULES", "4800"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_text_equals_its_solo_run(group: int) -> None:
    totals = Totals()
    count = -(-SCHEDULES // GROUPS)
    for seed in range(group * count, (group + 1) * count):
        try:
            run_schedule(seed, totals)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert totals.schedules == count
    assert totals.most_of_step_limit <= 1
    if count >= 500:
        reached = (
            totals.refused,
            totals.aborted,
            totals.failed,
            totals.compressions,
            totals.recomputed,
            totals.swapped,
            totals.cached_tokens,
        )
        assert all(reached), f"the workload does not reach everything: {totals}"
