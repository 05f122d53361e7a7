"""The verifier of schedules refuses exactly what does not compute a step."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import Fault, VerificationError
from fxpipe.schedule import B, F, Recipe, Schedule, Task, U
from fxpipe.schedules import gpipe, inference, one_f_one_b
from fxpipe.verify.schedule import verify_schedule
from tests.mutants import schedule_mutants
from tests.reference import schedule_is_right

LIBRARY = (gpipe, one_f_one_b, inference)


def faults_of(schedule: Schedule) -> tuple[Fault, ...]:
    with pytest.raises(VerificationError) as caught:
        verify_schedule(schedule)
    return caught.value.faults


def fault_of(text: str) -> Fault:
    """The only fault of a schedule's text."""
    (fault,) = faults_of(Schedule.parse(text))
    return fault


def accepts(schedule: Schedule) -> bool:
    try:
        verify_schedule(schedule)
    except VerificationError:
        return False
    return True


@pytest.mark.parametrize("recipe", LIBRARY, ids=lambda recipe: recipe.name)
def test_a_valid_schedule_is_returned_as_it_is(recipe: Recipe) -> None:
    for devices in range(1, 6):
        for microbatches in range(1, 9):
            schedule = recipe(devices, microbatches)
            assert verify_schedule(schedule) is schedule


@pytest.mark.parametrize("recipe", LIBRARY, ids=lambda recipe: recipe.name)
def test_single_edits_are_refused_exactly_when_they_change_the_step(recipe: Recipe) -> None:
    tried: Counter[tuple[str, str]] = Counter()
    accepted = 0
    for devices in range(1, 5):
        for microbatches in range(1, 4):
            for edit, kind, mutant in schedule_mutants(recipe(devices, microbatches)):
                right = schedule_is_right(mutant)
                assert accepts(mutant) == right, f"{edit} {kind}:\n{mutant}"
                tried[edit, kind] += 1
                accepted += right
    edits = "drop", "duplicate", "swap", "move", "give away"
    changes = "change stage", "change micro-batch", "change kind"
    kinds = "F" if recipe is inference else "FBU"
    assert not [(e, k) for e in (*edits, *changes) for k in kinds if not tried[e, k]]
    assert accepted or recipe is inference


def shuffled(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 3))
    devices = draw(st.integers(1, stages))
    homes = st.integers(0, devices - 1)
    placement = tuple(draw(st.lists(homes, min_size=stages, max_size=stages)))
    rows = []
    for device in range(devices):
        held = [stage for stage in range(stages) if placement[stage] == device]
        tasks = [make(i, s) for s in held for make in (F, B) for i in range(microbatches)]
        rows.append((*draw(st.permutations(tasks)), *(U(stage) for stage in held)))
    return Schedule("shuffled", microbatches, placement, tuple(rows))


@given(st.composite(shuffled)())
def test_any_order_is_refused_exactly_when_it_does_not_run(schedule: Schedule) -> None:
    assert accepts(schedule) == schedule_is_right(schedule)


def test_a_missing_task_is_named_with_its_micro_batches() -> None:
    schedule = one_f_one_b(2, 6)
    row = tuple(task for task in schedule.rows[1] if task not in (B(1, 1), B(3, 1), B(4, 1)))
    (fault,) = faults_of(replace(schedule, rows=(schedule.rows[0], row)))
    assert str(fault) == "device 1: stage 1 has no backward of micro-batches 1 and 3-4; add it"


def test_a_missing_update_is_named() -> None:
    fault = fault_of(
        "schedule mine stages=2 microbatches=1 delay=0\nplace 0 | 1\n0: F0 B0 U\n1: F0 B0"
    )
    assert str(fault) == "device 1: stage 1 has no update; add it"


def test_a_duplicated_task_is_named_with_its_first_place() -> None:
    fault = fault_of("schedule mine stages=1 microbatches=2 delay=0\nplace 0\n0: F0 F1 F0 B0 B1 U")
    assert (fault.device, fault.position, fault.subject) == (0, 2, "F0@0")
    assert fault.what == "it is there already: device 0, position 0"


def test_a_task_on_another_device_than_its_stage_is_named() -> None:
    schedule = Schedule("mine", 1, (0, 1), ((F(0, 0), F(0, 1), B(0, 0), U(0)), (B(0, 1), U(1))))
    faults = faults_of(schedule)
    assert str(faults[0]) == (
        "device 0, position 1, F0@1: stage 1 is on device 1; move the task there"
    )


def test_a_backward_before_its_forward_is_named_and_is_no_deadlock() -> None:
    fault = fault_of("schedule mine stages=1 microbatches=1 delay=0\nplace 0\n0: B0 F0 U")
    assert str(fault) == (
        "device 0, position 0, B0@0: it comes before F0@0, position 1, which it needs; "
        "move it behind that"
    )


def test_an_update_before_the_last_backward_is_named_once() -> None:
    fault = fault_of(
        "schedule mine stages=1 microbatches=3 delay=0\nplace 0\n0: F0 F1 F2 U B0 B1 B2"
    )
    assert (fault.position, fault.subject) == (3, "U@0")
    assert fault.what == "it comes before B2@0, position 6, which it needs"


def test_descending_micro_batches_are_refused() -> None:
    fault = fault_of("schedule mine stages=1 microbatches=2 delay=0\nplace 0\n0: F0 F1 B1 B0 U")
    assert (fault.position, fault.subject) == (3, "B0@0")
    assert fault.what == "it comes after micro-batch 1"


def test_a_deadlock_is_shown_device_by_device() -> None:
    faults = faults_of(
        Schedule.parse(
            "schedule mine stages=3 microbatches=2 delay=0\n"
            "place 0 | 1 | 2\n"
            "0: F0 B0 F1 B1 U\n"
            "1: F0 F1 B0 B1 U\n"
            "2: F0 F1 B0 B1 U\n"
        )
    )
    assert [str(fault) for fault in faults] == [
        "device 0, position 1, B0@0: deadlock: it waits until device 1 is past position 2, B0@1, "
        "and that device is stuck in the same circle; reorder one of the devices of the circle",
        "device 1, position 1, F1@1: deadlock: it waits until device 0 is past position 2, F1@0, "
        "and that device is stuck in the same circle; reorder one of the devices of the circle",
    ]


def test_every_fault_is_reported_at_once() -> None:
    rows = (
        (F(0, 0), F(5, 0), Task("X", 0, 0), B(0, 0), U(0)),
        (F(0, 1), F(0, 7), Task("F", None, 1), Task("U", 0, 1), F(1, None), B(0, 1), U(1)),
    )
    found = [fault.what for fault in faults_of(Schedule("mine", 1, (0, 1), rows))]
    assert found == [
        "there is no micro-batch 5",
        "there is no kind of task 'X'",
        "there is no stage 7",
        "it names no micro-batch",
        "it comes once a step, not for a micro-batch",
        "it names no stage",
    ]


@pytest.mark.parametrize(
    "schedule",
    [
        replace(gpipe(2, 2), delay=1),
        Schedule("mine", 1, (0,), ((F(0, 0), B(0, 0, batch=-1), U(0)),)),
        Schedule("mine", 1, (0,), ((F(0, 0), B(0, 0, batch=1), U(0), Task("X", 0, 0)),)),
    ],
)
def test_overlapping_batches_are_refused_in_one_fault(schedule: Schedule) -> None:
    (fault,) = faults_of(schedule)
    assert fault.what == "it lets batches overlap, and that is not run yet"


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("mine", 0, (0,), ((),)),
        Schedule("mine", 1, (), ((),)),
        Schedule("mine", 1, (1,), ((F(0, 0),),)),
        Schedule("mine", 1, (-1,), ((F(0, 0),),)),
        Schedule("mine", 1, (0,), ()),
    ],
)
def test_counts_and_placement_are_checked_first(schedule: Schedule) -> None:
    assert len(faults_of(schedule)) == 1


def test_a_device_without_a_stage_is_accepted() -> None:
    text = "schedule mine stages=2 microbatches=1 delay=0\nplace 0 | - | 1\n0: F0\n1:\n2: F0\n"
    verify_schedule(Schedule.parse(text))


def test_the_time_grows_with_the_number_of_tasks_alone() -> None:
    def seconds(devices: int, microbatches: int) -> float:
        schedule = one_f_one_b(devices, microbatches)
        runs: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            verify_schedule(schedule)
            runs.append(time.perf_counter() - start)
        return min(runs)

    assert seconds(8, 512) < 20 * seconds(8, 64) + 0.05  # 8 times the tasks
    assert seconds(64, 64) < 20 * seconds(8, 64) + 0.05
