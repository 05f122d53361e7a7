"""What steps with pairs take, and which times of pairs are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.schedules import one_f_one_b
from tests.oracles.small_simulator import idle, makespan, run_of, simulate
from tests.schedules.test_pairs import paired, pairings, runs


@given(pairings(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_pair_starts_once_and_takes_its_own_time(
    schedule: Schedule, f: int, i: int, w: int, data: st.DataObject
) -> None:
    takes = {"F": f, "B": i + w, "I": i, "W": w, "A": 0, "U": 0}
    for kind in schedule.kinds & {*"BIW"}:
        takes[f"F&{kind}"] = data.draw(st.integers(max(f, takes[kind]), f + takes[kind]))
    if not schedule.paired:
        takes = {kind: time for kind, time in takes.items() if "&" not in kind}
    if not runs(schedule):
        return
    found, expected = schedule.simulate(takes), simulate(schedule, takes)
    assert found.makespan == makespan(expected)
    assert found.bubble_size == idle(expected)


def test_a_pair_of_which_only_one_half_has_a_batch_is_none() -> None:
    window = Schedule.parse("""
schedule window stages=2 microbatches=2 delay=1
place 0 | 1
0: F0&B0' F1&B1' U'
1: F0 F1&B0 B1 U
""").verify()
    takes = {"F": 2, "B": 4, "U": 0, "F&B": 5}
    for steps in 1, 2, 4:
        whole = run_of(window, steps)
        halves = frozenset(
            then
            for tasks in whole.rows
            for first, then in pairwise(tasks)
            if (first.kind, then.kind) == ("F", "B")
            if int(first.microbatch or 0) - int(then.microbatch or 0) == 2 - (then.stage or 0)
        )
        assert len(halves) == 2 * (steps - 1) + steps
        expected = simulate(replace(whole, paired=halves), takes)
        assert window.simulate(takes, steps=steps).makespan == makespan(expected)


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ({"F&B": 4}, "F3@0&B0@0, whose tasks take 1 and 2; give a time from 2 to 3"),
        ({"F&B": 1}, "give a time from 2 to 3"),
        ({"F&Q": 2}, "no kind of task 'F&Q'"),
    ],
)
def test_a_time_that_no_pair_can_take_is_named(costs: dict[str, float], told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        paired(2, 4).simulate(costs)


def test_times_of_pairs_are_refused_where_there_are_none() -> None:
    with pytest.raises(InputError, match="has none; leave it out"):
        one_f_one_b(2, 4).simulate({"F&B": 2})
