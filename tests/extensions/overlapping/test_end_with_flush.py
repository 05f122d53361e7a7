"""The order of a batch that runs alone, of schedules that let batches overlap."""

from __future__ import annotations

import pytest

from fxpipe.errors import VerificationError
from fxpipe.extensions.overlapping.delays import end_with_flush
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.schedule import write_schedule
from fxpipe.schedules import one_f_one_b, one_f_one_b_async, pipedream, two_bw

GRID = [(p, m) for p in range(1, 7) for m in range(1, 9)]


@pytest.mark.parametrize("recipe", [two_bw, one_f_one_b_async, pipedream], ids=lambda r: r.name)
def test_one_f_one_b_without_flush_becomes_that_with_it(recipe: Recipe) -> None:
    for p, m in GRID:
        schedule = recipe(p, m)
        made = end_with_flush(schedule).verify()
        assert made.rows == one_f_one_b(p, m).rows
        assert (made.delay, made.depth) == (schedule.delay, 0)
        assert not any(made.versions().smallest)


def test_a_schedule_that_ends_with_a_flush_stays_as_it_is() -> None:
    schedule = one_f_one_b(3, 4)
    assert end_with_flush(schedule) == schedule


def test_the_example_of_its_docstring() -> None:
    text = "schedule 2bw stages=4 microbatches=2 delay=1\nplace 0 | 1 | 2 | 3\n"
    made = end_with_flush(two_bw(4, 2))
    assert str(two_bw(4, 2)).splitlines()[2] == "0: F0 B1'' U'' F1 B0'"
    assert made.rows[0] == Schedule.parse(f"{text}0: F0 F1 B0 B1 U\n1:\n2:\n3:").rows[0]


def test_a_short_batch_that_a_stage_would_read_too_early_ends_with_a_flush() -> None:
    recipe = one_f_one_b_async.delayed((0, 2))
    assert max(recipe(2, 2).delays) > recipe(2, 2).versions().delay  # of the other stage alone
    assert write_schedule(recipe, 2, 2, short=True) == end_with_flush(recipe(2, 2))
    with pytest.raises(VerificationError, match="delay=0 is too small for stage 0"):
        write_schedule(recipe, 2, 2, short=False)
    enough = one_f_one_b_async.delayed((1, 0))
    assert write_schedule(enough, 2, 2, short=True) == enough(2, 2)
