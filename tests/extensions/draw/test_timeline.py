"""When tasks run on paper: as a simulator of a few lines runs them, and schedules at fault."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.draw.timeline import Timeline, timeline_of
from fxpipe.extensions.simulator.costs import Costs
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import A, B, F, Task, U
from fxpipe.schedules import gpipe, one_f_one_b
from tests.oracles import small_simulator


def walk(schedule: Schedule, costs: Costs | None = None, *, steps: int = 1) -> Timeline:
    return timeline_of(schedule, costs, steps)[0]


def test_times_of_a_small_schedule() -> None:
    spans = walk(one_f_one_b(2, 2)).spans
    assert [(str(s.task), s.start, s.end) for s in spans] == [
        ("F0@0", 0, 1),
        ("F1@0", 1, 2),
        ("B0@0", 4, 6),
        ("B1@0", 7, 9),
        ("U@0", 9, 9.5),
        ("F0@1", 1, 2),
        ("B0@1", 2, 4),
        ("F1@1", 4, 5),
        ("B1@1", 5, 7),
        ("U@1", 9, 9.5),
    ]


def test_with_a_delay_an_update_waits_for_its_own_stage_alone() -> None:
    flushed = one_f_one_b(2, 2)
    delayed = Schedule("delayed", 2, flushed.placement, flushed.rows, delay=1)
    assert [s.start for s in walk(delayed).spans if s.task.kind == "U"] == [9, 7]


def test_a_cycle_is_stuck_and_ends() -> None:
    rows = ((F(0, 0), B(0, 0), F(1, 0), B(1, 0)), (F(1, 1), F(0, 1), B(1, 1), B(0, 1)))
    timeline = walk(Schedule("cycle", 2, (0, 1), rows))
    assert [str(span.task) for span in timeline.spans] == ["F0@0"]
    assert [(s.device, s.start, str(s.task)) for s in timeline.stuck] == [
        (0, 1, "B0@0"),
        (1, 0, "F1@1"),
    ]
    assert len(timeline.unrun) == 7


def test_what_waits_for_a_task_behind_it_is_stuck() -> None:
    timeline = walk(Schedule("behind", 1, (0,), ((B(0, 0), F(0, 0), U(0)),)))
    assert [str(span.task) for span in timeline.stuck] == ["B0@0"]
    assert [span.start for span in timeline.unrun] == [0, 2, 3]


def test_what_no_device_computes_is_not_waited_for() -> None:
    timeline = walk(Schedule("gap", 1, (0, 1), ((), (F(0, 1), B(0, 1)))))
    assert [(span.start, str(span.task)) for span in timeline.spans] == [(0, "F0@1"), (1, "B0@1")]


def test_what_an_earlier_window_held_has_run_already() -> None:
    rows = ((B(0, 0, batch=-1), F(0, 0)), (B(0, 1, batch=-1), F(0, 1)))
    timeline = walk(Schedule("window", 1, (0, 1), rows, delay=1))
    assert [(str(s.task), s.start) for s in timeline.spans] == [
        ("B0'@0", 2),
        ("F0@0", 4),
        ("B0'@1", 0),
        ("F0@1", 5),
    ]


def test_an_update_of_a_schedule_at_fault_waits_for_its_own_stage_alone() -> None:
    rows = ((F(0, 0), B(0, 0), U(0), U(0)), (F(0, 1), B(0, 1), U(1)))
    spans = walk(Schedule("twice", 1, (0, 1), rows)).spans
    assert [s.start for s in spans if s.task.kind == "U"] == [6, 6.5, 4]


@pytest.mark.parametrize(
    "task",
    [F(0), F(0, 99), A(99), A(-3), U(99), Task("?", 0, 0), Task("?", None, 0), U()],
)
def test_strange_tasks_do_not_break_the_walk(task: Task) -> None:
    timeline = walk(Schedule("strange", 1, (0,), ((F(0, 0), task, task),)))
    assert len(timeline.spans) + len(timeline.unrun) == 3


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"Q": 1}, "no kind of task 'Q'"),
        ({"F": -1}, r"costs\['F'\] is -1"),
        ({"B": float("nan")}, "costs\\['B'\\] is nan"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(InputError, match=message):
        walk(gpipe(2, 2), costs)


def test_an_empty_schedule_takes_no_time() -> None:
    timeline = walk(Schedule("empty", 1, (0,), ((),)))
    assert (timeline.end, timeline.spans) == (0, ())


@given(
    st.sampled_from(sorted(RECIPES)),
    st.integers(1, 5),
    st.integers(1, 8),
    st.fixed_dictionaries({letter: st.integers(0, 5) for letter in "FBIW"}),
    st.integers(1, 4),
)
def test_a_valid_schedule_runs_as_a_simulator_of_a_few_lines_runs_it(
    name: str, p: int, m: int, costs: dict[str, int], steps: int
) -> None:
    try:
        schedule = RECIPES[name](p, m).verify()
    except FxpipeError:
        assume(False)
    takes = {**costs, "A": 0, "U": 0}
    timeline = walk(schedule, takes, steps=steps)
    expected = small_simulator.simulate(small_simulator.run_of(schedule, steps), takes)
    if schedule.overlaps:
        assert_runs_as(timeline, expected)
    else:  # the reference knows no barrier, and neither does a single step without it
        assert_runs_as(walk(schedule, takes), small_simulator.simulate(schedule, takes))


def assert_runs_as(timeline: Timeline, expected: small_simulator.Timeline) -> None:
    for device, own in enumerate(expected):
        drawn = [(s.start, s.end) for s in timeline.spans if s.device == device and works(s.task)]
        assert drawn == [(ran.start, ran.end) for ran in own if works(ran.task)]


def works(task: Task) -> bool:
    return task.microbatch is not None
