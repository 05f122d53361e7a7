"""The library's schedules against drawn grids, and against their papers' figures.

The simulator here is a few lines of its own: it knows the tasks and their dependencies alone.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import count
from typing import NamedTuple

import pytest

from fxpipe.errors import InputError
from fxpipe.schedule import F, Recipe, Schedule, find_recipe
from fxpipe.schedules import gpipe, inference, one_f_one_b

GRIDS = {
    ("gpipe", 2, 1): """
F0  .  . B0
 . F0 B0  .
""",
    ("gpipe", 2, 2): """
F0 F1  .  . B0 B1
 . F0 F1 B0 B1  .
""",
    ("gpipe", 2, 4): """
F0 F1 F2 F3  .  . B0 B1 B2 B3
 . F0 F1 F2 F3 B0 B1 B2 B3  .
""",
    ("gpipe", 3, 2): """
F0 F1  .  .  .  . B0 B1
 . F0 F1  .  . B0 B1  .
 .  . F0 F1 B0 B1  .  .
""",
    ("gpipe", 3, 3): """
F0 F1 F2  .  .  .  . B0 B1 B2
 . F0 F1 F2  .  . B0 B1 B2  .
 .  . F0 F1 F2 B0 B1 B2  .  .
""",
    ("gpipe", 3, 5): """
F0 F1 F2 F3 F4  .  .  .  . B0 B1 B2 B3 B4
 . F0 F1 F2 F3 F4  .  . B0 B1 B2 B3 B4  .
 .  . F0 F1 F2 F3 F4 B0 B1 B2 B3 B4  .  .
""",
    ("gpipe", 4, 1): """
F0  .  .  .  .  .  . B0
 . F0  .  .  .  . B0  .
 .  . F0  .  . B0  .  .
 .  .  . F0 B0  .  .  .
""",
    ("gpipe", 4, 4): """
F0 F1 F2 F3  .  .  .  .  .  . B0 B1 B2 B3
 . F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3  .
 .  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .  .
 .  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .  .
""",
    ("gpipe", 4, 6): """
F0 F1 F2 F3 F4 F5  .  .  .  .  .  . B0 B1 B2 B3 B4 B5
 . F0 F1 F2 F3 F4 F5  .  .  .  . B0 B1 B2 B3 B4 B5  .
 .  . F0 F1 F2 F3 F4 F5  .  . B0 B1 B2 B3 B4 B5  .  .
 .  .  . F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5  .  .  .
""",
    ("1f1b", 2, 1): """
F0  .  . B0
 . F0 B0  .
""",
    ("1f1b", 2, 2): """
F0 F1  . B0  . B1
 . F0 B0 F1 B1  .
""",
    ("1f1b", 2, 4): """
F0 F1  . B0 F2 B1 F3 B2  . B3
 . F0 B0 F1 B1 F2 B2 F3 B3  .
""",
    ("1f1b", 3, 2): """
F0 F1  .  .  . B0  . B1
 . F0 F1  . B0  . B1  .
 .  . F0 B0 F1 B1  .  .
""",
    ("1f1b", 3, 3): """
F0 F1 F2  .  . B0  . B1  . B2
 . F0 F1  . B0 F2 B1  . B2  .
 .  . F0 B0 F1 B1 F2 B2  .  .
""",
    ("1f1b", 3, 5): """
F0 F1 F2  .  . B0 F3 B1 F4 B2  . B3  . B4
 . F0 F1  . B0 F2 B1 F3 B2 F4 B3  . B4  .
 .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  .  .
""",
    ("1f1b", 4, 1): """
F0  .  .  .  .  .  . B0
 . F0  .  .  .  . B0  .
 .  . F0  .  . B0  .  .
 .  .  . F0 B0  .  .  .
""",
    ("1f1b", 4, 4): """
F0 F1 F2 F3  .  .  . B0  . B1  . B2  . B3
 . F0 F1 F2  .  . B0 F3 B1  . B2  . B3  .
 .  . F0 F1  . B0 F2 B1 F3 B2  . B3  .  .
 .  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .  .
""",
    ("1f1b", 4, 6): """
F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
 . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
 .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
 .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .
""",
    ("inference", 2, 3): """
F0 F1 F2  .
 . F0 F1 F2
""",
    ("inference", 4, 4): """
F0 F1 F2 F3  .  .  .
 . F0 F1 F2 F3  .  .
 .  . F0 F1 F2 F3  .
 .  .  . F0 F1 F2 F3
""",
}
"""(name, devices, micro-batches) → a row a device; a backward is drawn as long as a forward."""
SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 8, 13)]


class Ran(NamedTuple):
    """A task and when it ran."""

    task: str
    start: int
    end: int


def simulate(schedule: Schedule, forward: int, backward: int) -> list[list[Ran]]:
    """Device → its tasks and their times; each starts as soon as its device and inputs allow."""
    ends: dict[tuple[str, int | None, int | None], int] = {}
    free = [0] * schedule.devices
    timeline: list[list[Ran]] = [[] for _ in schedule.rows]
    rows = [list(row) for row in schedule.rows]
    while any(rows):
        for device, row in enumerate(rows):
            if not row:
                continue
            kind, i, s = row[0].kind, row[0].microbatch, row[0].stage
            assert s is not None
            last = s == schedule.stages - 1
            needs = {
                "F": [("F", i, s - 1)] if s else [],
                "B": [("F", i, s)] + ([] if last else [("B", i, s + 1)]),
                "U": [],
            }[kind]
            if all(need in ends for need in needs):
                start = max([free[device], *(ends[need] for need in needs)])
                end = start + {"F": forward, "B": backward, "U": 0}[kind]
                ends[kind, i, s] = free[device] = end
                timeline[device].append(Ran(f"{kind}{'' if i is None else i}", start, end))
                row.pop(0)
    return timeline


def makespan(timeline: list[list[Ran]]) -> int:
    return max(ran.end for own in timeline for ran in own)


def grid(schedule: Schedule) -> str:
    """A row a device, a column a unit of time, a backward as long as a forward."""
    timeline = simulate(schedule, 1, 1)
    rows = []
    for own in timeline:
        cells = ["."] * makespan(timeline)
        for ran in own:
            if ran.end > ran.start:
                cells[ran.start] = ran.task
        rows.append(" ".join(f"{cell:>2}" for cell in cells))
    return "\n".join(rows)


def peak_stash(schedule: Schedule, stage: int) -> int:
    """Micro-batches that a stage keeps at once, at most."""
    kept = peak = 0
    for task in schedule.rows[schedule.placement[stage]]:
        if task.stage == stage:
            kept += {"F": 1, "B": -1, "U": 0}[task.kind]
            peak = max(peak, kept)
    return peak


@pytest.mark.parametrize(("name", "devices", "microbatches"), GRIDS)
def test_a_schedule_runs_as_drawn(name: str, devices: int, microbatches: int) -> None:
    schedule = find_recipe(name)(devices, microbatches)
    assert grid(schedule) == GRIDS[name, devices, microbatches].strip("\n")


@pytest.mark.parametrize(
    ("recipe", "devices", "microbatches"), [(gpipe, 3, 3), (one_f_one_b, 3, 4), (inference, 2, 3)]
)
def test_the_grid_in_a_docstring_is_right(recipe: Recipe, devices: int, microbatches: int) -> None:
    lines = (recipe.tasks.__doc__ or "").splitlines()
    rows = [line.partition(": ")[2] for line in lines if re.match(r"\s+\d: ", line)]
    drawn = [row.removesuffix(" U") for row in rows]
    assert "\n".join(drawn) == grid(recipe(devices, microbatches))


def test_one_f_one_b_of_four_devices_is_the_text_in_the_papers_figure() -> None:
    assert str(one_f_one_b(4, 4)) == (
        "schedule 1f1b stages=4 microbatches=4 delay=0\n"
        "place 0 | 1 | 2 | 3\n"
        "0: F0 F1 F2 F3 B0 B1 B2 B3 U\n"
        "1: F0 F1 F2 B0 F3 B1 B2 B3 U\n"
        "2: F0 F1 B0 F2 B1 F3 B2 B3 U\n"
        "3: F0 B0 F1 B1 F2 B2 F3 B3 U\n"
    )


@pytest.mark.parametrize("recipe", [gpipe, one_f_one_b], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 4)])
def test_a_step_takes_the_time_of_its_formula(recipe: Recipe, forward: int, backward: int) -> None:
    for p, m in SIZES:
        timeline = simulate(recipe(p, m), forward, backward)
        took = makespan(timeline)
        assert took == (m + p - 1) * (forward + backward)
        busy = sum(ran.end - ran.start for own in timeline for ran in own)
        assert 1 - Fraction(busy, p * took) == Fraction(p - 1, m + p - 1)


def test_inference_takes_the_time_of_its_formula() -> None:
    for p, m in SIZES:
        assert makespan(simulate(inference(p, m), 3, 4)) == 3 * (m + p - 1)


def test_gpipe_keeps_every_micro_batch_and_one_f_one_b_only_those_ahead() -> None:
    for p, m in SIZES:
        for stage in range(p):
            assert peak_stash(gpipe(p, m), stage) == m
            assert peak_stash(one_f_one_b(p, m), stage) == min(p - stage, m)


def test_an_unknown_name_is_answered_with_the_near_ones() -> None:
    with pytest.raises(InputError, match="did you mean '1f1b'"):
        find_recipe("1f1")


@pytest.mark.parametrize(("devices", "microbatches"), [(0, 1), (1, 0), (-1, 2)])
def test_counts_below_one_are_refused(devices: int, microbatches: int) -> None:
    with pytest.raises(InputError, match="needs at least 1"):
        gpipe(devices, microbatches)


def test_a_generator_that_does_not_end_is_stopped() -> None:
    recipe = Recipe("endless", lambda device, devices, microbatches: map(F, count()))
    with pytest.raises(InputError, match="let the generator end"):
        recipe(2, 2)


def test_what_is_no_task_is_refused_with_its_place() -> None:
    recipe = Recipe("odd", lambda device, devices, microbatches: ["F0"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="device 0, position 0: got 'F0'"):
        recipe(2, 2)
