"""Weight versions: the smallest delay and the live versions against runs that count them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import VerificationError
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, Task, U
from fxpipe.schedules import (
    gpipe,
    inference,
    one_f_one_b,
    one_f_one_b_async,
    pipedream,
    two_bw,
    zb_h1,
)

GRID = [(p, m) for p in range(1, 9) for m in range(1, 2 * p + 1)]


def counted(schedule: Schedule, stage: int, delay: int) -> tuple[bool, int]:
    """Whether a version is not there when it is read, and how many live at once, by running a
    stage.

    A version lives until nobody will read it again, the newest always.
    """
    steps = 2 * (schedule.depth + delay) + 4
    events: list[Task] = [
        replace(task, batch=step + task.batch)
        for step in range(steps + schedule.depth)
        for task in schedule.rows[schedule.placement[stage]]
        if task.stage == stage and 0 <= step + task.batch < steps
    ]
    last_read = {}
    for at, task in enumerate(events):
        if task.kind != "U":
            last_read[max(task.batch - delay, 0)] = at
    newest = most = 0
    missing = False
    for at, task in enumerate(events):
        if task.kind == "U":
            newest += 1
            live = [v for v in range(newest) if last_read.get(v, -1) > at]
            most = max(most, len(live) + 1)
        else:
            missing = missing or max(task.batch - delay, 0) > newest
    return missing, max(most, 1)


def assert_as_counted(schedule: Schedule) -> None:
    """The analysis finds what runs of its stages count."""
    versions = schedule.versions()
    for stage in range(schedule.stages):
        delay = schedule.delays[stage]
        least = next(d for d in range(100) if not counted(schedule, stage, d)[0])
        assert versions.smallest[stage] == least
        missing, live = counted(schedule, stage, delay)
        assert versions.live[stage] == live
        assert missing == (delay < least)


def test_one_f_one_b_without_flush_needs_the_delay_of_the_formula() -> None:
    for p, m in GRID:
        versions = one_f_one_b_async(p, m).versions()
        assert versions.delay == -(-(p - 1) // m)
        assert versions.live[0] == versions.delay + 1
        assert versions.consistent
        assert versions.staleness == (versions.delay,) * p


def test_2bw_has_a_delay_of_one_and_two_versions() -> None:
    for p, m in GRID:
        if m >= p - 1:
            versions = two_bw(p, m).verify().versions()
            assert versions.live == (2,) * p
            assert versions.delay <= 1
            assert versions.staleness == (1,) * p


def test_pipedream_has_the_versions_of_its_paper_on_each_stage() -> None:
    for p in range(1, 9):
        versions = pipedream(p, 1).verify().versions()
        assert versions.smallest == versions.delays == tuple(p - 1 - s for s in range(p))
        assert versions.live == tuple(p - s for s in range(p))
        assert versions.consistent == (p == 1)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"inference"}))
def test_the_analysis_of_a_library_schedule_is_what_a_run_counts(name: str) -> None:
    for p, m in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 4), (5, 2)]:
        schedule = RECIPES[name](p, m)
        assert_as_counted(schedule)


@given(st.data())
def test_the_analysis_of_any_delays_is_what_a_run_counts(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    base = data.draw(st.sampled_from([one_f_one_b_async, gpipe, zb_h1, add_late(2)]))(p, m)
    delays = st.tuples(*[st.integers(0, 4)] * p)
    assert_as_counted(replace(base, delay=data.draw(delays)))


def add_late(batches: int) -> Recipe:
    """1F1B without a flush whose updates, and last backwards, come some steps later yet."""
    return replace(
        one_f_one_b_async,
        tasks=lambda device, devices, microbatches: (
            task if task.kind == "F" else replace(task, batch=task.batch - batches)
            for task in one_f_one_b_async.tasks(device, devices, microbatches)
        ),
    )


def test_the_smallest_delays_of_the_stages_are_enough() -> None:
    for p, m in GRID:
        schedule = one_f_one_b_async(p, m)
        least = replace(schedule, delay=schedule.versions().smallest).verify()
        assert least.delay == pipedream(p, m).delay
        assert least.versions().smallest == schedule.versions().smallest


def test_a_delay_that_is_too_small_names_the_stage_and_the_smallest_that_works() -> None:
    for p, m in GRID:
        for delay in range(4):
            schedule = replace(one_f_one_b_async(p, m), delay=delay)
            enough = -(-(p - 1) // m)
            if delay >= enough:
                schedule.verify()
                continue
            with pytest.raises(VerificationError) as caught:
                schedule.verify()
            stages = [s for s in range(p) if -(-(p - 1 - s) // m) > delay]
            assert [f.device for f in caught.value.faults] == stages
            for fault, stage in zip(caught.value.faults, stages, strict=True):
                needs = -(-(p - 1 - stage) // m)
                assert f"delay={delay} is too small for stage {stage}, which needs {needs}" in str(
                    fault
                )
                assert f"use delay={enough}, the smallest that works" in fault.cure


def test_a_fault_of_a_delay_says_who_makes_the_version_and_where() -> None:
    with pytest.raises(VerificationError) as caught:
        replace(one_f_one_b_async(2, 1), delay=0).verify()
    assert [str(fault) for fault in caught.value.faults] == [
        "device 0, position 0, F0@0: delay=0 is too small for stage 0, which needs 1: batch t "
        "reads version t here, and U'@0, position 2, makes that only later; use delay=1, the "
        "smallest that works"
    ]


def test_a_delay_for_each_stage_is_answered_with_one_for_each_stage() -> None:
    with pytest.raises(VerificationError, match=r"use delay=2,1,0, the smallest that works"):
        replace(pipedream(3, 1), delay=(2, 0, 0)).verify()


def test_a_flush_needs_no_delay_and_may_have_one() -> None:
    for recipe in (gpipe, one_f_one_b):
        schedule = recipe(3, 4)
        assert schedule.versions().live == (1, 1, 1)
        stale = replace(schedule, delay=2).verify().versions()
        assert stale.live == (3, 3, 3)
        assert stale.delay == 0


def test_a_delay_where_nothing_is_updated_is_refused() -> None:
    with pytest.raises(VerificationError, match="it has a delay, and nothing updates the weights"):
        replace(inference(2, 2), delay=1).verify()


@pytest.mark.parametrize("delay", [-1, (1, -1), (1,), (1, 1, 1), (), (1, 0.5), ((1, 0), 1)])
def test_a_delay_that_is_none_is_refused(delay: Any) -> None:
    with pytest.raises(VerificationError, match="delay"):
        replace(one_f_one_b(2, 2), delay=delay).verify()


def test_versions_of_a_schedule_out_of_order_are_refused() -> None:
    schedule = Schedule("mine", 1, (0,), ((B(0, 0), F(0, 0), U(0)),))
    with pytest.raises(VerificationError, match="it comes before F0@0"):
        schedule.versions()
