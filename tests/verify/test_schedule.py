"""The verifier of schedules refuses exactly what does not compute a step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import Fault, InputError, VerificationError
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, A, B, F, Task, U
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules import one_f_one_b
from fxpipe.schedules.one_f_one_b import seq1f1b
from fxpipe.verify.schedule import verify_schedule
from tests.helpers.faults import faults_of
from tests.helpers.lines import lines
from tests.helpers.mutants import sampled, schedule_mutants
from tests.helpers.plans import add_reduce
from tests.helpers.profiles import DEEP, some
from tests.oracles.schedule_executor import schedule_is_right

LIBRARY = tuple(RECIPES.values())


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
        least = devices - 1 if recipe.name == "2bw" else 1
        for microbatches in range(max(least, 1), 9):
            schedule = recipe(devices, microbatches)
            assert verify_schedule(schedule) is schedule


RIGHT_FAULTS = {
    "drop": "has no (forward|backward|(input|weight) gradient|update|reduce)|it comes before|"
    "is never (fetched|stored)",
    "duplicate": "it is there already",
    "give away": "stage .* is on device",
    "change placement": "is on device|is placed on device|later step|next step|deadlock",
    "change delay": "delay|is too small",
}
"""Edit → what one of the faults is about, where it is refused."""

COPIED_FAULTS = {
    "give away": "has a copy of stage|is on device|is there already|has no (reduce|update)",
    "change delay": "it has copies of stages, and its batches overlap",
    "change copies": "is on device|is placed on device|has no reduce",
}
"""The same where stages have copies, on one of which a task may well be."""


REDUCING = "reducing zb-h1", "reducing dualpipe-v", "reducing pipedream"
OFFLOADING = "offloading gpipe", "offloading zb-h1", "offloading 2bw", "offloading both gpipe"
EDITED = (*RECIPES, "recomputing", "own tasks", *REDUCING, *OFFLOADING)


def edits_of(name: str) -> Iterator[tuple[str, str, Schedule]]:
    """Edits of schedules of this name: what is done, to which kind of task, and what it makes."""
    for devices, microbatches in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 4)):
        schedule = made(name, devices, microbatches)
        yield from sampled(schedule_mutants(schedule), None if DEEP else 12)


@pytest.mark.parametrize("name", EDITED if DEEP else EDITED[1::3])
def test_single_edits_are_refused_exactly_when_they_change_the_steps(name: str) -> None:
    accepted = refused = 0
    for edit, kind, mutant in some(edits_of(name), 2):
        try:
            verify_schedule(mutant)
        except VerificationError as error:
            refused += 1
            assert not schedule_is_right(mutant), f"{error}\n{mutant}"
            if edit in RIGHT_FAULTS:
                what = RIGHT_FAULTS[edit] + f"|{COPIED_FAULTS.get(edit)}" * bool(mutant.copies)
                assert re.search(what, str(error)), f"{edit} {kind}: {error}"
        else:
            accepted += 1
            assert schedule_is_right(mutant), f"{edit} {kind}:\n{mutant}"
    assert accepted
    assert refused > accepted


def test_no_class_of_edits_is_left_out() -> None:
    tried = Counter((edit, kind) for name in EDITED for edit, kind, _ in edits_of(name))
    edits = "drop", "duplicate", "swap", "move", "give away"
    changes = "change stage", "change micro-batch", "change kind", "change batch"
    wanted = {(edit, kind) for edit in (*edits, *changes) for kind in "FBIWROPUANL"}
    wanted |= {("change placement", "-"), ("change delay", "-")}
    assert not {each for each in wanted if tried[each] < 3}
    assert sum(tried.values()) > 10_000


@pytest.fixture(scope="module", autouse=True)
def own_tasks() -> Iterator[None]:
    """N looks at gradients, once a step; L at the weights after a micro-batch's forward."""
    norm = {"reads": ("gradients",), "follows": "BW", "cost": 1.0}
    fxpipe.define_task("N", "norm", run=lambda context: None, **norm)  # type: ignore[arg-type]
    look = {"reads": ("parameters",), "follows": "F", "cost": 1.0, "per_microbatch": True}
    fxpipe.define_task("L", "look", run=lambda context: None, **look)  # type: ignore[arg-type]
    yield
    del KINDS["N"], KINDS["L"]


def made(name: str, devices: int, microbatches: int) -> Schedule:
    """A schedule of the library, or one with kinds of tasks that the library does not use."""
    if name in RECIPES:
        return RECIPES[name](devices, microbatches)
    if name.startswith("reducing "):
        return add_reduce(RECIPES[name.partition(" ")[2]](devices, microbatches))
    if name.startswith("offloading "):
        schedule = RECIPES[name.split()[-1]](devices, max(microbatches, devices))
        if "both" in name:
            schedule = add_recompute(schedule, "always")
        return offloading(schedule)
    schedule = RECIPES["1f1b" if name == "recomputing" else "1f1b-async"](devices, microbatches)
    rows: list[list[Task]] = [[] for _ in schedule.rows]
    for device, row in enumerate(schedule.rows):
        for task in row:
            if name == "recomputing" and task.kind == "B" and device < devices - 1:
                rows[device].append(replace(task, kind="R"))
            if name == "own tasks" and task.kind == "U":
                rows[device].append(replace(task, kind="N"))
            rows[device].append(task)
            if name == "own tasks" and task.kind == "F":
                rows[device].append(replace(task, kind="L"))
    return replace(schedule, rows=tuple(map(tuple, rows)))


def offloading(schedule: Schedule) -> Schedule:
    """Micro-batches but the last are stored behind their forward, and fetched before the task that
    needs what it kept."""
    needs = "R" if "R" in schedule.kinds else "BI"
    rows: list[list[Task]] = [[] for _ in schedule.rows]
    for row, tasks in zip(rows, schedule.rows, strict=True):
        for task in tasks:
            stored = task.microbatch is not None and task.microbatch < schedule.microbatches - 1
            if stored and task.kind in needs:
                row.append(replace(task, kind="P"))
            row.append(task)
            if stored and task.kind == "F":
                row.append(replace(task, kind="O"))
    return replace(schedule, rows=tuple(map(tuple, rows)))


KINDS_OF_A_MICRO_BATCH = ("FB", "FB", "FRB", "FIW", "FOPB", "FOPIW", "FROPB", "FOB")


def shuffled(draw: st.DrawFn) -> Schedule:
    """Any order of all tasks for any batches, right or wrong, over any placement."""
    stages = draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 2))
    devices = draw(st.integers(1, stages))
    homes = st.integers(0, devices - 1)
    placement = tuple(draw(st.lists(homes, min_size=stages, max_size=stages)))
    batches = st.integers(draw(st.sampled_from([0, -1, -2])), 0)
    reduces = draw(st.booleans())
    rows = []
    for device in range(devices):
        tasks = []
        for stage in (stage for stage in range(stages) if placement[stage] == device):
            for i in range(microbatches):
                kinds = draw(st.sampled_from(KINDS_OF_A_MICRO_BATCH))
                tasks += [Task(kind, i, stage, draw(batches)) for kind in kinds]
            tasks += [A(stage, batch=draw(batches))] * reduces
            tasks.append(U(stage, batch=draw(batches)))
        if draw(st.booleans()):
            order = "FROPBIWAU"
            tasks.sort(key=lambda task: (-task.batch, order.index(task.kind), task.microbatch))
        else:
            tasks = draw(st.permutations(tasks))
        rows.append(tuple(tasks))
    delay = draw(st.integers(0, 3) | st.tuples(*[st.integers(0, 3)] * stages))
    return Schedule("shuffled", microbatches, placement, tuple(rows), delay)


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
    assert str(faults[0]) == ("device 0, position 1, F0@1: stage 1 is on device 1; move it there")


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


def test_forwards_take_the_micro_batches_in_order_and_backwards_in_any() -> None:
    fault = fault_of("schedule mine stages=1 microbatches=2 delay=0\nplace 0\n0: F1 F0 B1 B0 U")
    assert (fault.position, fault.subject) == (1, "F0@0")
    assert fault.what == "it comes after micro-batch 1"
    Schedule.parse(
        "schedule mine stages=1 microbatches=2 delay=0\nplace 0\n0: F0 F1 B1 B0 U"
    ).verify()


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


def test_a_task_that_needs_what_only_a_later_step_makes_is_refused() -> None:
    fault = fault_of(
        "schedule mine stages=2 microbatches=1 delay=1\nplace 0 | 1\n0: F0 B0 U\n1: F0 B0' U'"
    )
    assert str(fault) == (
        "device 0, position 1, B0@0: its batch runs B0'@1, which it needs, only in the next step: "
        "device 1, position 1; let both stand for the same batch, or that one for a later batch"
    )


def test_forwards_of_the_next_batch_wait_for_those_of_the_last() -> None:
    fault = fault_of("schedule mine stages=1 microbatches=2 delay=1\nplace 0\n0: F0 F1' B0' B1' U'")
    assert (fault.position, fault.subject) == (1, "F1'@0")
    assert fault.what == "it comes after F0@0 of the next batch"


@pytest.mark.parametrize(
    "parts", [("F", 0.5, 0), ("F", 0, 0.0), ("F", 0, 0, 0.5), ("F", None, "0"), (0, 0, 0)]
)
def test_a_task_that_is_not_of_whole_numbers_is_refused(parts: Any) -> None:
    (fault,) = faults_of(Schedule("mine", 1, (0,), ((Task(*parts), B(0, 0), U(0)),)))
    assert fault.what == "it is not a task with whole numbers"


def test_the_error_carries_the_schedule_for_a_picture() -> None:
    schedule = Schedule("mine", 1, (0,), ((F(0, 0),),), delay=-1)
    with pytest.raises(VerificationError) as caught:
        verify_schedule(schedule)
    assert caught.value.value is schedule


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": None}, "rows of a schedule is None; give for each device a tuple of its tasks"),
        ({"rows": (F(0, 0),)}, "rows of a schedule is .*; give for each device"),
        ({"placement": None}, "placement of a schedule is .*None.*; give a tuple with the device"),
        ({"copies": (1,)}, r"copies of a schedule is \(1,\); give for each stage a tuple"),
        ({"copies": None}, "copies of a schedule is None; give for each stage a tuple"),
    ],
)
def test_what_is_no_tuple_is_refused_when_a_schedule_is_made(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        replace(Schedule("mine", 1, (0,), ((F(0, 0), B(0, 0)),)), **wrong)


HUGE = 999_999_999


too_many = pytest.mark.parametrize(
    ("counts", "row", "message"),
    [
        (f"microbatches={HUGE} delay=0", "F0 B0 U", f"its {HUGE} micro-batches .* holds 3 tasks"),
        (
            f"microbatches=1 delay={HUGE}",
            "F0 B0 U",
            f"reaches {HUGE} batches back; .* at most 1000",
        ),
        ("microbatches=1 delay=1001", "F0 B0 U", "reaches 1001 batches back"),
        ("microbatches=1 delay=0", "F0 B0" + 9000 * "'" + " U", "reaches 9000 batches back"),
    ],
)
"""Counts in a schedule of one row that are refused, and why."""


@too_many
def test_counts_that_one_line_asks_for_are_refused_before_any_work(
    counts: str, row: str, message: str
) -> None:
    text = f"schedule mine stages=1 {counts}\nplace 0\n0: {row}\n"
    schedule = Schedule.parse(text)
    for look in (schedule.verify, schedule.versions, schedule.kept):
        with pytest.raises(VerificationError, match=message) as caught:
            look()
        assert len(caught.value.faults) == 1


def test_limits_of_counts_refuse_nothing_that_can_be_told() -> None:
    head = "schedule mine stages=1 microbatches={} delay={}\nplace 0\n0: F0 B0 U\n"
    verify_schedule(Schedule.parse(head.format(1, 1000)))
    message = "no forward of micro-batches 1-10002"
    assert any(message in str(f) for f in faults_of(Schedule.parse(head.format(10_003, 0))))
    (fault,) = faults_of(Schedule.parse(head.format(10_004, 0)))
    assert "its 10004 micro-batches have at least 10004 forwards on 1 stages" in str(fault)
    verify_schedule(one_f_one_b(1, 20_000))


def test_a_device_without_a_stage_is_accepted() -> None:
    text = "schedule mine stages=2 microbatches=1 delay=0\nplace 0 | - | 1\n0: F0\n1:\n2: F0\n"
    verify_schedule(Schedule.parse(text))


def test_the_work_grows_with_the_number_of_tasks_alone() -> None:
    def work(devices: int, microbatches: int) -> int:
        schedule = one_f_one_b(devices, microbatches)
        return lines(lambda: verify_schedule(schedule))

    assert work(8, 512) < 9 * work(8, 64)  # 8 times the tasks
    assert work(64, 64) < 9 * work(8, 64)


def runs_in_slices(schedule: Schedule, row: int) -> bool:
    """Whether devices that wait for what a slice reads come to the end of their rows."""

    def needs(task: Task) -> list[Task]:
        c, d = divmod(task.stage or 0, row)
        step = 1 if task.kind == "F" else -1
        near = [(c, d - step), (c - step, d)]
        tasks = [
            Task(task.kind, task.microbatch, slice * row + device)
            for slice, device in near
            if 0 <= slice < schedule.slices and 0 <= device < row
        ]
        return tasks if task.kind == "F" else [*tasks, replace(task, kind="F")]

    rows = [[task for task in tasks if task.kind != "U"] for tasks in schedule.rows]
    done: set[Task] = set()
    while ready := [tasks for tasks in rows if tasks and done.issuperset(needs(tasks[0]))]:
        done.update(tasks.pop(0) for tasks in ready)
    return not any(rows)


@given(data=st.data())
def test_an_order_of_slices_is_accepted_exactly_when_it_runs(data: st.DataObject) -> None:
    devices, slices = data.draw(st.integers(1, 2)), data.draw(st.integers(2, 3))
    schedule = seq1f1b(slices)(devices, data.draw(st.integers(1, 2)))
    rows = [[*row] for row in schedule.rows]
    for _ in range(data.draw(st.integers(0, 3))):
        row = data.draw(st.sampled_from(rows))
        last = len(row) - slices - 1  # updates stay where they are
        a, b = data.draw(st.integers(0, last)), data.draw(st.integers(0, last))
        row[a], row[b] = row[b], row[a]
    changed = replace(schedule, rows=tuple(map(tuple, rows)))
    in_order = all(
        forwards == sorted(forwards)
        for row in rows
        for stage in {task.stage for task in row}
        for forwards in [[t.microbatch or 0 for t in row if (t.kind, t.stage) == ("F", stage)]]
    )
    assert accepts(changed) == (runs_in_slices(changed, devices) and in_order)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slices": 3}, "has 4 stages in 3 slices"),
        ({"slices": 0}, "has 4 stages in 0 slices"),
        ({"placement": (0, 1, 1, 0)}, "slices of a stage are on different devices"),
        ({"copies": ((1,), (), (), ())}, "has slices and copies of stages"),
    ],
)
def test_slices_that_fit_no_stages_are_refused(changes: dict[str, Any], text: str) -> None:
    assert text in str(faults_of(replace(seq1f1b(2)(2, 2), **changes))[0])
