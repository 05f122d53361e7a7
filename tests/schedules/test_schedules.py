"""The library of schedules: what holds for all of them, and how recipes refuse bad input."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import fxpipe
from fxpipe import schedules
from fxpipe.errors import InputError, VerificationError
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe, round_robin, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, Task, U
from fxpipe.schedules import gpipe
from tests.helpers.profiles import some
from tests.oracles.small_simulator import (
    AS_LONG,
    HALVES,
    device_kept,
    drawn_in,
    grid,
    peak_stash,
    run_of,
)

BOX = some((p, m) for p in range(1, 7) for m in range(1, 14))

DRAWN: dict[str, tuple[int, int, dict[str, int], int]] = {
    "naive": (3, 2, AS_LONG, 1),
    "gpipe": (3, 3, AS_LONG, 1),
    "1f1b": (3, 4, AS_LONG, 1),
    "interleaved-1f1b": (2, 4, AS_LONG, 1),
    "looped-bfs": (2, 3, AS_LONG, 1),
    "zb-h1": (3, 5, HALVES, 1),
    "zb-h2": (3, 6, HALVES, 1),
    "zb-v": (2, 4, HALVES, 1),
    "v-half": (3, 3, HALVES, 1),
    "v-min": (3, 3, HALVES, 1),
    "dualpipe-v": (2, 4, HALVES, 1),
    "2bw": (3, 3, AS_LONG, 2),
    "pipedream": (3, 1, AS_LONG, 6),
    "1f1b-async": (3, 2, AS_LONG, 3),
    "chimera": (4, 4, AS_LONG, 1),
    "interleaved-zb": (2, 4, HALVES, 1),
    "hanayo": (2, 2, AS_LONG, 1),
    "inference": (2, 3, AS_LONG, 1),
}
"""Every schedule of the library → what its docstring draws: p, m, how long its tasks are, steps."""

LIBRARY = {name: find_recipe(name) for name in DRAWN if name in RECIPES}
by_name = pytest.mark.parametrize("recipe", LIBRARY.values(), ids=list(LIBRARY))


def made(recipe: Recipe, devices: int, microbatches: int) -> Schedule:
    """The schedule; a delay of one step, as 2BW's, asks for p − 1 micro-batches."""
    return recipe(devices, max(microbatches, devices - 1) if recipe.name == "2bw" else microbatches)


def test_the_library_is_there_by_name_and_every_docstring_is_checked() -> None:
    own = [getattr(schedules, name) for name in schedules.__all__]
    assert {recipe.name: recipe for recipe in own} == LIBRARY
    assert len(own) == len(LIBRARY)


@by_name
def test_every_schedule_is_valid(recipe: Recipe) -> None:
    for p, m in BOX:
        made(recipe, p, m).verify()


@pytest.mark.parametrize("recipe", ["naive", "gpipe", "looped-bfs", "interleaved-1f1b"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_schedules_over_more_stages_a_device_are_valid(recipe: str, chunks: int) -> None:
    for p, m in BOX:
        LIBRARY[recipe].placed(round_robin(chunks))(p, m).verify()


@by_name
def test_the_verifier_counts_the_stash_as_the_few_lines_of_the_tests_do(recipe: Recipe) -> None:
    for p, m in BOX:
        schedule = recipe(p, m)
        if schedule.trains:
            run = run_of(schedule, 3 * p)
            stages = tuple(peak_stash(run, stage) for stage in range(run.stages))
            devices = tuple(device_kept(run, device) for device in range(p))
            found = schedule.kept()
            assert (found.stages, found.devices) == (stages, devices)


@by_name
def test_every_schedule_is_its_own_text(recipe: Recipe) -> None:
    for p, m in BOX:
        schedule = recipe(p, m)
        assert Schedule.parse(str(schedule)) == schedule


@by_name
def test_a_generator_is_as_short_as_its_figure(recipe: Recipe) -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(recipe.tasks))).body[0]
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:]
    assert body[-1].end_lineno is not None
    assert body[-1].end_lineno - body[0].lineno < 25


@pytest.mark.parametrize("name", DRAWN)
def test_the_grid_in_a_docstring_is_right(name: str) -> None:
    devices, microbatches, takes, steps = DRAWN[name]
    recipe = find_recipe(name)
    assert drawn_in(recipe) == grid(run_of(recipe(devices, microbatches), steps), takes)


def test_an_unknown_name_is_answered_with_the_near_ones() -> None:
    with pytest.raises(InputError, match="did you mean '1f1b'"):
        find_recipe("1f1")


@pytest.mark.parametrize(("devices", "microbatches"), [(0, 1), (1, 0), (-1, 2)])
def test_counts_below_one_are_refused(devices: int, microbatches: int) -> None:
    with pytest.raises(InputError, match="needs at least 1"):
        gpipe(devices, microbatches)
    with pytest.raises(InputError, match=r"devices is 2\.0; give a whole number"):
        gpipe(2.0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(1, 999_999_999), (999_999_999, 1), (10, 1_000_001)])
def test_counts_of_which_no_schedule_can_be_made_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="a schedule is made for at most 10000000 forwards"):
        gpipe(*counts)


def test_counts_may_be_numbers_of_numpy() -> None:
    two: Any = np.int64(2)
    assert gpipe(two, two) == gpipe(2, 2)


@pytest.mark.parametrize("placement", [lambda p: count(), lambda p: (0,) * 2_000_000])
def test_a_placement_of_more_stages_than_there_can_be_is_refused(placement: Any) -> None:
    with pytest.raises(InputError, match=r"gives \d+ stages or more, and microbatches is 8"):
        gpipe.placed(placement)(2, 8)


def test_a_generator_gets_the_stages_and_the_placement_that_it_asks_for() -> None:
    told: dict[int, tuple[object, ...]] = {}

    def tasks(
        device: int, devices: int, microbatches: int, placement: object, stages: tuple[int, ...]
    ) -> Iterator[Task]:
        told[device] = stages, placement
        yield from (F(0, stage) for stage in stages)

    assert Recipe("asks", tasks, placement=vee)(2, 1).placement == (0, 1, 1, 0)
    assert told == {0: ((0, 3), (0, 1, 1, 0)), 1: ((1, 2), (0, 1, 1, 0))}


def test_a_task_without_its_stage_is_told_in_a_line_however_many_there_are() -> None:
    recipe = Recipe("odd", lambda device, devices, microbatches: [F(0)])
    with pytest.raises(InputError, match="the device holds 1000: 0, 2, ") as told:
        recipe.placed(round_robin(1000))(2, 8)
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("chunks", [0, 1.5, "2", None])
def test_chunks_are_a_whole_number(chunks: Any) -> None:
    with pytest.raises(InputError, match="chunks is "):
        round_robin(chunks)
    with pytest.raises(InputError, match="chunks is 100000000 for 2 devices"):
        gpipe.placed(round_robin(10**8))(2, 8)


@pytest.mark.parametrize("name", [3, None, gpipe.tasks])
def test_a_decorator_without_a_name_is_told_how_to_write_it(name: Any) -> None:
    with pytest.raises(InputError, match=r'such as @fxpipe.schedule\("mine"\)'):
        fxpipe.schedule(name)


@pytest.mark.parametrize(
    "placement",
    [[0, 1], None, lambda p: None, lambda p: (0.0, 1.0), lambda p: ("a",), lambda p: 1 / 0],
)
def test_a_placement_that_gives_no_devices_is_refused_by_name(placement: Any) -> None:
    recipe = gpipe.placed(placement)
    for look in (lambda: recipe(2, 1), lambda: recipe.stages(2)):
        with pytest.raises(InputError, match=r"'gpipe': its placement is .*; give a function"):
            look()


@pytest.mark.parametrize(
    "delay", ["1", None, 0.0, (0.0, 1), [None], lambda p, m: 0.5, lambda p, m: p / 0]
)
def test_a_delay_that_is_no_number_is_refused_by_name(delay: Any) -> None:
    with pytest.raises(InputError, match=r"'gpipe': delay=.* gives no whole number"):
        gpipe.delayed(delay)(2, 1)


def test_lists_of_devices_and_delays_are_as_good_as_tuples() -> None:
    recipe: Any = gpipe.placed(lambda p: [0, 1]).delayed([1, 0])  # type: ignore[arg-type,return-value]
    assert recipe(2, 1) == gpipe.delayed((1, 0))(2, 1)


@pytest.mark.parametrize(
    "task",
    [
        *(F(0.0), F("0"), F([0]), F(0, 0.0), F(0, "0"), F(0, batch=0.0), F(0, batch=None)),  # type: ignore[arg-type]
        *(Task(F, 0), Task(5, 0), Task(["F"], 0), Task(None, 0)),  # type: ignore[arg-type]
    ],
)
def test_a_task_is_of_a_letter_and_whole_numbers(task: Task) -> None:
    recipe = Recipe("odd", lambda device, devices, microbatches: [task, B(0), U()])
    with pytest.raises(
        InputError, match=r"device 0, position 0: got Task.*; yield tasks such as F"
    ):
        recipe(1, 1)
    with pytest.raises(VerificationError, match=r"position 0, .*: it is not a task with whole"):
        Schedule("odd", 1, (0,), ((task, B(0, 0), U(0)),)).verify()


def test_a_generator_that_does_not_end_is_stopped() -> None:
    recipe = Recipe("endless", lambda device, devices, microbatches: map(F, count()))
    with pytest.raises(InputError, match="let the generator end"):
        recipe(2, 2)


def test_what_is_no_task_is_refused_with_its_place() -> None:
    recipe = Recipe("odd", lambda device, devices, microbatches: ["F0"])
    with pytest.raises(InputError, match="device 0, position 0: got 'F0'"):
        recipe(2, 2)


@by_name
def test_no_schedule_takes_the_place_of_the_librarys(recipe: Recipe) -> None:
    def mine(*where: int) -> Iterator[Task]:
        yield from ()

    with pytest.raises(InputError, match=f"{recipe.name!r} is a schedule of the library"):
        fxpipe.schedule(recipe.name)(mine)
    assert find_recipe(recipe.name) is recipe


def test_a_schedule_of_ones_own_is_replaced_by_a_later_one_of_its_name() -> None:
    def first(*where: int) -> Iterator[Task]:
        yield F(0)

    def second(*where: int) -> Iterator[Task]:
        yield B(0)

    fxpipe.schedule("replaced")(first)
    later = fxpipe.schedule("replaced")(second)
    assert find_recipe("replaced") is later
