"""DualPipe has the order of its authors' program."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fxpipe import InputError, Schedule
from fxpipe.ir.recipe import find_recipe
from fxpipe.schedules.dualpipe_v import dualpipe

TABLES = (Path(__file__).parents[1] / "published" / "schedules.txt").read_text().split("\n\n")
DUALPIPE = [Schedule.parse(table) for table in TABLES if table.startswith("# DualPipe, ")]


@pytest.mark.parametrize("schedule", DUALPIPE, ids=lambda schedule: schedule.name)
def test_dualpipe_is_as_its_authors_program(schedule: Schedule) -> None:
    own = dualpipe(schedule.devices, schedule.microbatches)
    assert replace(own, name=schedule.name) == schedule
    if schedule.microbatches >= 2 * schedule.devices:
        assert own.stash().devices == (schedule.devices + 1,) * schedule.devices


def test_dualpipe_takes_any_number_of_microbatches_and_even_numbers_of_devices() -> None:
    assert find_recipe("dualpipe") is dualpipe
    for p, m in product((2, 4, 6, 8), range(1, 20)):
        dualpipe(p, m).verify()
    with pytest.raises(InputError, match="devices is 3; DualPipe needs an even number of them"):
        dualpipe(3, 6)
