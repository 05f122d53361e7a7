"""Steps of searched schedules whose batches overlap."""

from __future__ import annotations

import pytest

from fxpipe.extensions.search.search import search_schedule
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.overlapping.test_overlapping_steps import compare


@pytest.mark.parametrize(("placement", "microbatches"), [(None, 1), ((0, 1, 1, 2, 0, 2), 4)])
def test_a_searched_schedule_without_flush_is_the_loop_with_delayed_gradients(
    placement: tuple[int, ...] | None, microbatches: int
) -> None:
    costs: dict[Key, float] = {"F": 2, "B": 5, ("F", 2): 3, "I": 2, "W": 2, "U": 1}
    schedule = search_schedule(
        costs, microbatches, placement=placement, flush=False, work=30
    ).schedule
    assert (schedule.delay, schedule.depth) == (1, 0)
    pipe = compare("mlp", "adamw", 3, microbatches, schedule=schedule, delay=1, batches=8)
    assert set(pipe.weight_versions) == {2}
