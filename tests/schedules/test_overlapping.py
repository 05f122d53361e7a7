"""Schedules without flush, as windows: order, bubble, memory, and which weights batches read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest

from fxpipe.errors import VerificationError
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.schedules import (
    one_f_one_b,
    one_f_one_b_async,
    pipedream,
    two_bw,
)
from tests.helpers.profiles import some
from tests.oracles.small_simulator import (
    AS_LONG,
    busy,
    makespan,
    peak_stash,
    run_of,
    simulate,
    times,
)

STEPS = 4
BOX = some((p, m) for p in range(1, 7) for m in range(1, 14))

overlapping = pytest.mark.parametrize(
    "recipe",
    [two_bw, pipedream, one_f_one_b_async],
    ids=lambda r: r.name,
)


def computed(row: tuple[Task, ...]) -> list[Task]:
    return [task for task in row if task.kind != "U"]


def row_of(schedule: Schedule, stage: int) -> tuple[Task, ...]:
    """What the stage's device does in many steps."""
    alone = replace(schedule, rows=(schedule.rows[schedule.placement[stage]],))
    return run_of(alone, 3 * STEPS).rows[0]


def smallest_delay(schedule: Schedule, stage: int) -> int:
    """By how many updates a forward on the stage is ahead of those before it, at most."""
    updates = behind = 0
    for task in row_of(schedule, stage):
        if task.kind == "U":
            updates += 1
        elif task.kind == "F":
            assert task.microbatch is not None
            behind = max(behind, task.microbatch // schedule.microbatches - updates)
    return behind


def live_versions(schedule: Schedule, stage: int) -> int:
    """The newest version and those that a task to come still reads, at most."""
    m = schedule.microbatches
    row = row_of(schedule, stage)
    numbers = [t.microbatch for t in row if t.microbatch is not None]
    reads = [max(i // m - schedule.delays[stage], 0) for i in numbers]
    newest = most = 0
    for task in row:
        most = max(most, len({newest} | {version for version in reads if version <= newest}))
        if task.kind == "U":
            newest += 1
        else:
            del reads[0]
    return most


@overlapping
def test_steps_in_a_row_are_one_long_one_f_one_b(recipe: Recipe) -> None:
    for p, m in BOX:
        run, long = run_of(recipe(p, m), STEPS), one_f_one_b(p, m * STEPS)
        assert [computed(row) for row in run.rows] == [computed(row) for row in long.rows]


@overlapping
@pytest.mark.parametrize("takes", [AS_LONG, times(1, 1, 1)])
def test_the_bubble_comes_once_a_run(recipe: Recipe, takes: dict[str, int]) -> None:
    for p, m in BOX:
        run = run_of(recipe(p, m), STEPS)
        timeline = simulate(run, takes)
        work = sum(busy(timeline, device) for device in range(p))
        bubble = 1 - Fraction(work, p * makespan(timeline))
        assert bubble == Fraction(p - 1, m * STEPS + p - 1)
        for stage in range(p):
            assert peak_stash(run, stage) == min(p - stage, m * STEPS)


@overlapping
def test_a_window_holds_the_forwards_of_its_own_batch_alone(recipe: Recipe) -> None:
    for p, m in BOX:
        for stage, row in enumerate(recipe(p, m).rows):
            forwards = [task for task in row if task.kind == "F"]
            assert forwards == [Task("F", i, stage) for i in range(m)]


@overlapping
def test_a_window_needs_nothing_of_a_later_one(recipe: Recipe) -> None:
    for p, m in BOX:
        rows = recipe(p, m).rows
        ago = [{t.microbatch: -t.batch for t in row if t.kind == "B"} for row in rows]
        for stage, behind in itertools.pairwise(ago):
            assert all(behind[i] <= windows for i, windows in stage.items())


@overlapping
def test_a_stage_updates_right_after_its_last_backward_of_the_batch(recipe: Recipe) -> None:
    for p, m in BOX:
        for row in recipe(p, m).rows:
            updates = [j for j, task in enumerate(row) if task.kind == "U"]
            assert len(updates) == 1
            last, update = row[updates[0] - 1 : updates[0] + 1]
            assert (last.kind, last.microbatch, last.batch) == ("B", m - 1, update.batch)


@overlapping
def test_the_verifier_finds_the_same_versions(recipe: Recipe) -> None:
    for p, m in BOX:
        schedule = recipe(p, m)
        versions = schedule.versions()
        assert versions.smallest == tuple(smallest_delay(schedule, stage) for stage in range(p))
        assert versions.live == tuple(live_versions(schedule, stage) for stage in range(p))


def test_pipedream_reads_the_newest_weights_of_each_stage() -> None:
    for p, m in BOX:
        schedule = pipedream(p, m)
        assert schedule.delays == tuple(ceil((p - 1 - stage) / m) for stage in range(p))
        assert schedule.delays == tuple(smallest_delay(schedule, stage) for stage in range(p))
    assert pipedream(4, 1).delays == (3, 2, 1, 0)


def test_without_flush_the_delay_is_the_smallest_that_all_stages_share() -> None:
    for p, m in BOX:
        schedule = one_f_one_b_async(p, m)
        assert schedule.delay == ceil((p - 1) / m)
        assert schedule.delay == max(smallest_delay(schedule, stage) for stage in range(p))
        live = max(live_versions(schedule, stage) for stage in range(p))
        assert live == ceil((p - 1) / m) + 1


def test_two_bw_keeps_two_versions_and_asks_for_the_micro_batches_that_this_takes() -> None:
    for p, m in BOX:
        schedule = two_bw(p, m)
        assert schedule.delay == 1
        assert {live_versions(schedule, stage) for stage in range(p)} == {2}
        enough = m >= p - 1
        assert enough == (max(smallest_delay(schedule, stage) for stage in range(p)) <= 1)
        if enough:
            schedule.verify()
        else:
            with pytest.raises(VerificationError, match=f"delay={ceil((p - 1) / m)}"):
                schedule.verify()
            two_bw.delayed(ceil((p - 1) / m))(p, m).verify()


def test_pipedream_keeps_a_version_for_each_micro_batch_under_way() -> None:
    for p in range(1, 7):
        schedule = pipedream(p, 1)
        assert [live_versions(schedule, stage) for stage in range(p)] == list(range(p, 0, -1))
