"""Stages on several devices: schedules with them are refused by name, or compute the plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import ParseError, VerificationError
from fxpipe.extensions.replicas.lowering import add_reduce
from fxpipe.ir import task
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.schedules import chimera
from tests.helpers.plans import add_clip, chain_program
from tests.oracles.schedule_executor import schedule_is_right
from tests.verify.test_program import (
    OF_COPIES,
    SHARED,
    Case,
    assert_edits_are_judged,
    assert_returned_as_they_are,
    edits_of,
    recomputing,
)
from tests.verify.test_schedule import accepts, fault_of

pytestmark = pytest.mark.smoke

WHOLE = Schedule.parse(
    "schedule whole stages=3 microbatches=2 delay=0\n"
    "place 0 1 2 | +0 +1 +2\n"
    "0: F0@0 F0@1 F0@2 B0@2 B0@1 B0@0 A@1 A@0 A@2 U@0 U@1 U@2\n"
    "1: F1@0 F1@1 F1@2 B1@2 A@2 B1@1 A@1 B1@0 A@0\n"
)
"""A copy of the whole model on a second device."""

CASES: dict[str, Case] = {
    "copies": (SHARED, True, False),
    "copies, clip, recompute": (add_clip(recomputing(chimera(2, 3))), True, False),
    "copies, several stages": (WHOLE, True, False),
    "copies, without updates": (chimera(4, 3), False, False),
}
"""Name → schedule, whether it is lowered with updates, and with a pause."""


@pytest.mark.parametrize("case", CASES)
def test_single_edits_are_refused_when_they_change_what_is_computed(case: str) -> None:
    assert_edits_are_judged(case, CASES)


@pytest.mark.deep
def test_no_class_of_edits_is_left_out() -> None:
    count = edits_of(CASES)
    edits = "drop", "duplicate", "swap", "move", "give away", "change batch", "change stage"
    wanted = {(edit, kind) for edit in edits for kind in OF_COPIES} | {("change copy", "Give")}
    assert not {each for each in wanted if count[each] < 2}


def test_valid_programs_are_returned_as_they_are() -> None:
    assert_returned_as_they_are(CASES)


HEAD = "schedule mine stages=2 microbatches=2 delay=0\nplace 0 +1 | +0 1\n"
RIGHT = (
    "0: F0@0 F1@1 B1@1 A@1 B0@0 A@0 U@0",
    "1: F1@0 F0@1 B0@1 A@1 B1@0 A@0 U@1",
)


@pytest.mark.parametrize(
    ("row", "old", "new", "fault"),
    [
        (1, "U@1", "U@1 U@0", "device 1 has a copy of stage 0, which computes micro-batches"),
        (0, "B1@1 A@1", "A@1 B1@1", "it comes before B1@1, position 3, which it needs"),
        (0, "A@1 ", "", "its copy of stage 1 has no reduce"),
        (0, "A@0 ", "", "stage 0 has no reduce"),
        (0, "F0@0", "F0@0 F1@0", "it is there already: device 0, position 1"),
        (0, "A@0 U@0", "U@0 A@0", "it comes before A@0, position 6, which it needs"),
    ],
)
def test_what_is_wrong_with_copies_is_told_by_its_name(
    row: int, old: str, new: str, fault: str
) -> None:
    rows = [*RIGHT]
    assert accepts(Schedule.parse(HEAD + "\n".join(rows)))
    assert old in rows[row]
    rows[row] = rows[row].replace(old, new)
    assert fault in faults_of(HEAD + "\n".join(rows))


def faults_of(text: str) -> str:
    with pytest.raises(VerificationError) as raised:
        Schedule.parse(text).verify()
    return str(raised.value)


def test_a_backward_on_another_device_than_its_forward_is_told_where_that_is() -> None:
    fault = fault_of(
        HEAD + "0: F0@0 F1@1 B1@1 A@1 B0@0 B1@0 A@0 U@0\n1: F1@0 F0@1 B0@1 A@1 A@0 U@1"
    )
    assert fault.what == "the forward of micro-batch 1 on stage 0 is on device 1"
    assert fault.cure == "move it there, or the forward here"


@pytest.mark.parametrize("per_microbatch", [True, False])
def test_a_task_of_ones_own_for_a_micro_batch_of_a_stage_with_copies_is_refused(
    per_microbatch: bool,
) -> None:
    fxpipe.define_task(
        "X", "extra", run=lambda context: None, follows="B", cost=1, per_microbatch=per_microbatch
    )
    own = "X0@0" if per_microbatch else "X@0"
    rows = [RIGHT[0].replace("B0@0", f"B0@0 {own}"), RIGHT[1]]
    try:
        if per_microbatch:
            fault = fault_of(HEAD + "\n".join(rows))
            assert "the weights of stage 0, whose copies have none of their own" in fault.what
            assert fault.cure == "define a task that comes once a step"
        else:
            assert accepts(Schedule.parse(HEAD + "\n".join(rows)))
    finally:
        del task.KINDS["X"]


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (((1,), (1,)), "stage 1 is on device 1 already"),
        (((1,), (0, 0)), "stage 1 is on device 0 already"),
        (((1,), (5,)), "a copy of stage 1 is placed on device 5"),
        (((1,),), "it has the copies of 1 stages, and 2 stages"),
    ],
)
def test_copies_in_wrong_places_are_told(place: tuple[tuple[int, ...], ...], fault: str) -> None:
    schedule = replace(Schedule.parse(HEAD + "\n".join(RIGHT)), copies=place)
    with pytest.raises(VerificationError, match=fault):
        schedule.verify()
    with pytest.raises(VerificationError, match=fault):
        replace(chain_program(find_recipe("chimera")(2, 2)), copies=place).verify()


@pytest.mark.parametrize("delay", [1, (0, 1)])
def test_copies_need_a_flush(delay: int | tuple[int, ...]) -> None:
    schedule = Schedule.parse(HEAD + "\n".join(RIGHT))
    with pytest.raises(VerificationError, match="its batches overlap or read older weights; end"):
        replace(schedule, delay=delay).verify()
    rows = tuple(
        tuple(replace(task, batch=-1) if task.kind in "BAU" else task for task in row)
        for row in schedule.rows
    )
    with pytest.raises(VerificationError, match="its batches overlap or read older weights; end"):
        replace(schedule, rows=rows).verify()


def test_a_place_without_the_stage_itself_is_no_text() -> None:
    with pytest.raises(ParseError, match="stage 1 has no device; name it in one of the places"):
        Schedule.parse(HEAD.replace("+0 1", "+0 +1") + "\n".join(RIGHT))
    with pytest.raises(ParseError, match=r"stage 0 is on device 0 already; .* or write \+0 for a"):
        Schedule.parse(HEAD.replace("+0 1", "0 1") + "\n".join(RIGHT))


copy_edits = given(
    st.tuples(st.integers(2, 4), st.integers(1, 4)),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["drop", "duplicate", "swap", "move", "give away", "kind", "stage", "copy"]
            ),
            st.integers(0, 200),
            st.integers(0, 100),
        ),
        max_size=4,
    ),
)
"""Devices and micro-batches, and edits for ``edited_copies``."""


@copy_edits
def test_edited_copies_are_refused_or_run(
    counts: tuple[int, int], edits: list[tuple[str, int, int]]
) -> None:
    edited = edited_copies(counts, edits)
    assert accepts(edited) == schedule_is_right(edited)
    if accepts(edited):
        program = chain_program(add_reduce(edited)).verify()
        assert type(program).parse(str(program)) == program


def edited_copies(counts: tuple[int, int], edits: list[tuple[str, int, int]]) -> Schedule:
    """Chimera, edited in turn: the edit, which task or copy, and where to."""
    schedule = find_recipe("chimera")(*counts)
    rows, copies = [list(row) for row in schedule.rows], list(map(set, schedule.copies))
    for edit, pick, to in edits:
        every = [(row, task) for row in rows for task in row]
        if edit == "copy" and copies:
            copies[pick % len(copies)] ^= {to % counts[0]}
        if edit == "copy" or not every:
            continue
        row, task = every[pick % len(every)]
        other = rows[to % len(rows)] if edit == "give away" else row
        at = row.index(task)
        if edit != "duplicate":
            row.remove(task)
        if edit == "kind":
            row.insert(at, Task("FBIWRAU"[to % 7], task.microbatch, task.stage))
        elif edit == "stage":
            row.insert(at, replace(task, stage=to % schedule.stages))
        elif edit != "drop":
            other.insert(at - 1 if edit == "swap" and at else to % (len(other) + 1), task)
    return replace(schedule, rows=tuple(map(tuple, rows)), copies=tuple(map(tuple, copies)))
