"""Schedules that sum gradients over replicas are refused, or do it at the right time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from tests.helpers.plans import add_reduce
from tests.oracles.schedule_executor import schedule_is_right
from tests.verify.test_schedule import accepts, fault_of

sum_edits = given(
    st.sampled_from(["gpipe", "zb-h1", "interleaved-1f1b", "dualpipe-v", "2bw", "pipedream"]),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["drop", "duplicate", "swap", "move", "give away", "change batch", "change delay"]
            ),
            st.booleans(),
            st.integers(0, 100),
            st.integers(0, 100),
        ),
        max_size=4,
    ),
)
"""A schedule, its devices and micro-batches, and edits for ``edited_sums``."""


@sum_edits
def test_edited_sums_over_replicas_are_refused_or_run(
    name: str, counts: tuple[int, int], edits: list[tuple[str, bool, int, int]]
) -> None:
    edited = edited_sums(name, counts, edits)
    assert accepts(edited) == schedule_is_right(edited)


def edited_sums(
    name: str, counts: tuple[int, int], edits: list[tuple[str, bool, int, int]]
) -> Schedule:
    """A schedule with sums, edited in turn: the edit, whether of sums alone, which task, where."""
    schedule = add_reduce(RECIPES[name](*counts))
    rows, delays = [list(row) for row in schedule.rows], list(schedule.delays)
    for edit, sums, pick, to in edits:
        if edit == "change delay":
            delays[pick % len(delays)] = to % 3
            continue
        every = [(row, task) for row in rows for task in row if task.kind == "A" or not sums]
        if not every:
            continue
        row, task = every[pick % len(every)]
        other = rows[to % len(rows)] if edit == "give away" else row
        at = row.index(task)
        if edit != "duplicate":
            row.remove(task)
        if edit == "change batch":
            row.insert(at, replace(task, batch=task.batch - 1 + 2 * (to % 2)))
        elif edit != "drop":
            other.insert(at - 1 if edit == "swap" and at else to % (len(other) + 1), task)
    return replace(schedule, rows=tuple(map(tuple, rows)), delay=tuple(delays))


def test_a_clip_before_a_sum_over_replicas_of_any_stage_is_refused() -> None:
    text = "schedule mine stages=2 microbatches=1 delay=0\nplace 0 1\n0: F0@0 F0@1 B0@1 B0@0 "
    assert accepts(Schedule.parse(f"{text} A@1 A@0 C@0 C@1 U@0 U@1"))
    fault = fault_of(f"{text} A@1 C@1 A@0 C@0 U@0 U@1")
    assert fault.what == "it comes before A@0, position 6, which it needs"
