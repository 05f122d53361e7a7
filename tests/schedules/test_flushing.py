"""Schedules that end each step with a flush and make whole backwards: grids and formulas."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxpipe.ir.recipe import Recipe, find_recipe, round_robin
from fxpipe.schedules import (
    gpipe,
    inference,
    interleaved_one_f_one_b,
    looped_bfs,
    naive,
    one_f_one_b,
)
from tests.oracles.small_simulator import (
    AS_LONG,
    busy,
    device_kept,
    grid,
    makespan,
    peak_stash,
    simulate,
    times,
)

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
"""(name, devices, micro-batches) → a row a device; a backward is drawn as long as a forward, and a
device's second stage in small letters."""

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 8, 13)]


@pytest.mark.parametrize(("name", "devices", "microbatches"), GRIDS)
def test_a_schedule_runs_as_drawn(name: str, devices: int, microbatches: int) -> None:
    schedule = find_recipe(name)(devices, microbatches)
    assert grid(schedule, AS_LONG) == GRIDS[name, devices, microbatches].strip("\n")


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
@pytest.mark.parametrize("takes", [AS_LONG, times(1, 1, 1), times(3, 2, 2)])
def test_a_step_takes_the_time_of_its_formula(recipe: Recipe, takes: dict[str, int]) -> None:
    for p, m in SIZES:
        timeline = simulate(recipe(p, m), takes)
        took = makespan(timeline)
        assert took == (m + p - 1) * (takes["F"] + takes["B"])
        work = sum(busy(timeline, device) for device in range(p))
        assert 1 - Fraction(work, p * took) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("takes", [AS_LONG, times(1, 1, 1), times(3, 2, 2)])
def test_naively_one_device_works_at_a_time(takes: dict[str, int]) -> None:
    for p, m in SIZES:
        schedule = naive(p, m)
        assert makespan(simulate(schedule, takes)) == p * m * (takes["F"] + takes["B"])
        assert [peak_stash(schedule, stage) for stage in range(p)] == [1] * p


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", [looped_bfs, interleaved_one_f_one_b], ids=lambda r: r.name)
@pytest.mark.parametrize("takes", [AS_LONG, times(1, 1, 1), times(3, 2, 2)])
def test_several_stages_a_device_cut_the_bubble(
    recipe: Recipe, takes: dict[str, int], v: int
) -> None:
    """Also where the devices do not divide the micro-batches."""
    for p in range(1, 7):
        for m in range(p, 14):
            took = makespan(simulate(recipe.placed(round_robin(v))(p, m), takes))
            assert took == (v * m + p - 1) * (takes["F"] + takes["B"])


def test_inference_takes_the_time_of_its_formula() -> None:
    for p, m in SIZES:
        assert makespan(simulate(inference(p, m), times(3, 1, 1))) == 3 * (m + p - 1)


def test_breadth_first_schedules_keep_every_micro_batch_and_one_f_one_b_only_those_ahead() -> None:
    for p, m in SIZES:
        for stage in range(p):
            assert peak_stash(gpipe(p, m), stage) == m
            assert peak_stash(one_f_one_b(p, m), stage) == min(p - stage, m)
        for stage in range(2 * p):
            assert peak_stash(looped_bfs(p, m), stage) == m


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_keeps_more_than_one_f_one_b_by_its_formula(v: int) -> None:
    for p in range(1, 7):
        for m in range(1, 14):
            schedule = interleaved_one_f_one_b.placed(round_robin(v))(p, m)
            longest = -(-m // max(m // p, 1))
            assert device_kept(schedule, 0) == min((v - 1) * longest + 2 * p - 1, v * m)
            if m % p == 0 and m > p:
                assert device_kept(schedule, 0) == v * p + p - 1
