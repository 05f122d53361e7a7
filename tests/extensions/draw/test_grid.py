"""Schedules as text in time, against grids drawn by hand."""

from __future__ import annotations

import re
from statistics import median
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.draw.grid import schedule_grid
from fxpipe.extensions.draw.timeline import timeline_of
from fxpipe.extensions.simulator.costs import Costs
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, U
from fxpipe.schedules import gpipe, inference, one_f_one_b

TIME = st.sampled_from([0.5, 1, 1.25, 2, 3])


def drawn(text: str) -> str:
    return dedent(text).strip("\n")


def test_a_grid_is_to_scale() -> None:
    assert one_f_one_b(2, 2).grid() == drawn(
        """
           0     2     4     6     8
        0: F0 F1 .  .  B0--- .  B1--- U
        1: .  F0 B0--- F1 B1--- .  .  U
        """
    )


def test_with_equal_times_it_is_the_figure_of_the_paper() -> None:
    rows = one_f_one_b(3, 4).grid(costs={"F": 1, "B": 1}).splitlines()[1:]
    assert rows == [
        "0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 U",
        "1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  U",
        "2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  U",
    ]


def test_stages_are_named_where_a_device_holds_several() -> None:
    rows = ((F(0, 0), F(0, 2), B(0, 2), B(0, 0), U(0), U(2)), (F(0, 1), B(0, 1), U(1)))
    schedule = Schedule("looped", 1, (0, 1, 0), rows)
    assert schedule_grid(schedule, costs={"B": 1, "U": 0}) == drawn(
        """
           0         2         4
        0: F0@0 .    F0@2 B0@2 .    B0@0
        1: .    F0@1 .    .    B0@1 .
        """
    )


def test_a_clip_starts_when_all_stages_have_their_gradients() -> None:
    grid = add_clip(one_f_one_b(2, 1)).grid(costs={"F": 1, "B": 2, "C": 1, "U": 1})
    assert grid == drawn(
        """
           0     2     4     6
        0: F0 .  .  .  B0--- C- U-
        1: .  F0 B0--- .  .  C- U-
        """
    )


def test_steps_in_a_row_name_the_batch() -> None:
    row = (F(0, 0), B(1, 0, batch=-1), U(0, batch=-1), F(1, 0), B(0, 0))
    schedule = Schedule("window", 2, (0,), (row,), delay=1)
    grid = schedule_grid(schedule, steps=2, costs={"B": 1})
    assert grid.splitlines()[1] == "0: F0b0 F1b0 B0b0 F0b1 B1b0 U- F1b1 B0b1 B1b1 U"


def test_faults_are_marked_and_listed() -> None:
    rows = ((F(0, 0), B(0, 0), U(0)), (F(1, 1), B(0, 1), F(0, 1), U(1)))
    grid = Schedule("broken", 1, (0, 1), rows).grid()
    lines = grid.splitlines()[1:]
    assert lines == [
        "0: F0- B0?---- U?",
        "1: F1! B0?!--- F0? U?",
        "! device 1, position 0, F1@1: there is no micro-batch 1; name one of the 1, from 0",
        "! device 1, position 1, B0@1: it comes before F0@1, position 2, which it needs; "
        "move it behind that",
    ]


def test_a_narrow_grid_goes_on_below_without_cutting_a_name() -> None:
    wide = one_f_one_b(4, 12).grid().splitlines()
    narrow = one_f_one_b(4, 12).grid(width=50)
    bands = [band.splitlines() for band in narrow.split("\n\n")]
    assert len(bands) > 2
    assert all(len(line) <= 50 for line in narrow.splitlines())
    for device in range(4):
        pieces = [band[device + 1].removeprefix(f"{device}: ") for band in bands]
        assert re.sub(r"\s+", "", "".join(pieces)) == re.sub(r"\s+", "", wide[device + 1][3:])
        assert all(re.fullmatch(r"\D.*|", piece) for piece in pieces)


@given(
    st.sampled_from([gpipe, one_f_one_b, inference]),
    st.integers(1, 4),
    st.integers(1, 12),
    TIME,
    TIME,
)
def test_tasks_stand_where_their_time_says(
    recipe: Recipe, p: int, m: int, forward: float, backward: float
) -> None:
    costs: Costs = {"F": forward, "B": backward, "U": 1}
    schedule = recipe(p, m)
    timeline, _ = timeline_of(schedule, costs)
    ruler, *rows = schedule.grid(costs=costs).splitlines()
    places = {}
    for span in timeline.spans:
        name = f"{span.task.kind}{'' if span.task.microbatch is None else span.task.microbatch}"
        (found,) = re.finditer(rf"\b{name}\b", rows[span.device][3:])
        places[span] = found.start()
    last = max(timeline.spans, key=lambda span: span.start)
    scale = places[last] / (last.start or 1)
    assert all(at == pytest.approx(span.start * scale, abs=1.5) for span, at in places.items())
    for found in re.finditer(r"\S+", ruler):
        assert found.start() - 3 == pytest.approx(float(found[0]) * scale, abs=1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"width": 9}, "width is 9"),
        ({"costs": {"Q": 1}}, "kind of task 'Q'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        one_f_one_b(2, 2).grid(**arguments)


@pytest.mark.parametrize("costs", [{("F", 0): 1e-9, ("B", 0): 1e-9, ("B", 1): 1e9}, {"U": 1e99}])
def test_a_grid_of_more_characters_than_anyone_reads_is_refused(costs: Costs) -> None:
    with pytest.raises(InputError, match="more than 100000000 characters; show fewer"):
        one_f_one_b(2, 3).grid(costs=costs)


def test_the_usual_time_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock(wraps=median)
    monkeypatch.setattr("fxpipe.extensions.draw.grid.median", calls)
    one_f_one_b(2, 50).grid()
    assert calls.call_count == 1


def test_an_empty_schedule_has_a_grid() -> None:
    faulty = schedule_grid(Schedule("empty", 1, (0,), ((),))).splitlines()
    assert all(line.startswith("! ") for line in faulty)


def test_what_is_stored_and_fetched_runs_beside_the_others() -> None:
    schedule = Schedule.parse(
        "schedule x stages=1 microbatches=4 delay=0\nplace 0\n"
        "0: F0 O0 F1 O1 F2 P0 F3 B0 P1 B1 B2 B3 U\n"
    )
    assert schedule.grid() == (
        "    0     2     4     6     8     10    12\n"
        " 0: F0 F1 F2 F3 B0--- .  B1--- B2--- B3--- U\n"
        "0O: .  O0 O1 .  .  .  .  .  .  .  .  .  .\n"
        "0P: .  .  .  P0 .  .  P1 .  .  .  .  .  ."
    )
    # F2 waits until what F0 kept is stored, F3 likewise, B0 and B1 until it is there again
    assert schedule.grid(costs={"O": 2, "P": 3}) == (
        "    0     2     4     6     8     10    12    14    16    18\n"
        " 0: F0 F1 .  F2 .  F3 .  .  B0--- .  .  .  B1--- B2--- B3--- U\n"
        "0O: .  O0--- O1--- .  .  .  .  .  .  .  .  .  .  .  .  .  .\n"
        "0P: .  .  .  .  .  P0------ .  .  P1------ .  .  .  .  .  ."
    )


def test_a_batch_that_nothing_valid_reaches_is_drawn_by_its_number() -> None:
    task = B(0, batch=-(10**7))
    schedule = Schedule("slip", 1, (0,), ((F(0), task, U()),))
    assert str(task) == "B0(-10000000)"
    assert "B0(-10000000)" in schedule.grid()
    assert len(schedule.draw().source) < 20_000
    assert str(B(0, batch=-1000)) == "B0" + "'" * 1000
