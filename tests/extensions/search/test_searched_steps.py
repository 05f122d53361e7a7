"""Steps of searched schedules whose batches overlap."""

from __future__ import annotations

import pytest

from fxpipe.extensions.search.search import search_schedule
from fxpipe.extensions.simulator.costs import Key
from tests.runtime.test_overlapping_steps import compare


@pytest.mark.parametrize(
    ("placement", "microbatches", "delay"), [(None, 1, 2), ((0, 1, 1, 2, 0, 2), 4, 1)]
)
def test_a_searched_schedule_without_flush_is_the_loop_with_delayed_gradients(
    placement: tuple[int, ...] | None, microbatches: int, delay: int
) -> None:
    costs: dict[Key, float] = {"F": 2, "B": 5, ("F", 2): 3, "I": 2, "W": 2, "U": 1}
    schedule = search_schedule(
        costs, microbatches, placement=placement, delay=delay, work=30, exact=False
    ).schedule
    assert (schedule.delay, schedule.depth > 0) == (delay, True)
    assert schedule.versions().delay == delay
    pipe = compare("mlp", "adamw", 3, microbatches, schedule=schedule, delay=delay, batches=8)
    assert set(pipe.weight_versions) == {delay + 1}
