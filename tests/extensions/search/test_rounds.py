"""Orders by rounds: valid in any problem, and as fast as zero bubble's heuristic in its own."""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.extensions.search.local import Local
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.rounds import orders_by_turns
from fxpipe.extensions.search.timing import peaks_of_order, value_of
from fxpipe.extensions.simulator import Link, Sizes
from tests.extensions.search.problems import larger, problems, shared
from tests.helpers.profiles import DEEP

PUBLISHED = Path(__file__).parents[2] / "published"
LENGTH = 1024
"""Tokens of a sequence in zero bubble's settings."""


def rows_of(name: str) -> list[dict[str, str]]:
    lines = (PUBLISHED / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def in_a_v(p: int, m: int, limit: float) -> Problem:
    """A setting of zero bubble's table of memory, with two stages a device."""
    (row,) = (
        row
        for row in rows_of("zero-bubble-rates.csv")
        if (row["table"], row["p"], row["m"]) == ("arxiv", str(p), str(m))
    )
    hidden, heads = int(row["hidden"]), int(row["heads"])
    kept, late = 34 * hidden + 5 * heads * LENGTH, 32 * hidden
    sizes = Sizes(
        saved=dict.fromkeys(range(2 * p), kept), deferred=dict.fromkeys(range(2 * p), late)
    )
    costs = {kind: int(row[kind]) / 2 for kind in "FIW"} | {"U": 0.0}
    link = Link(float(row["comm"]))
    most = 2 * limit * p * kept
    (problem,) = problems_of(Given(costs, m, p, fxpipe.vee, None, most, sizes, link, False))
    return problem


UNLIKE = Problem(
    microbatches=3,
    placement=(0, 1, 1, 0),
    forward=(2, 1, 1, 1),
    backward=(1, 2, 1, 1),
    weight=(1, 1, 2, 1),
    update=(0, 0, 0, 0),
    down=(1, 1, 1),
    up=(1, 2, 1),
    saved=(1, 1, 1, 2),
    deferred=(1, 1, 1, 1),
    memory=(3, 2),
    flush=False,
)
"""Forwards of stage 0 could fill what the first micro-batch leaves of stage 3, so that no other
micro-batch would find room there any more."""


@given(st.one_of(problems((1, 4), (1, 5)), shared(), larger()))
@example(UNLIKE)
@settings(max_examples=60)
def test_rounds_run_every_task_once_and_keep_to_the_memory(problem: Problem) -> None:
    for value, rows in orders_by_turns(problem):
        order = tuple(map(tuple, rows))
        problem.schedule_of(order).verify()
        kinds = 2 if problem.whole else 3
        for row, stages in zip(order, problem.held, strict=True):
            assert len(row) == len(stages) * kinds * problem.microbatches
        for peak, most in zip(peaks_of_order(problem, order), problem.memory, strict=True):
            assert peak <= most * (1 + 1e-9)
        if problem.flush:
            assert value == pytest.approx(value_of(problem, order))
        else:  # it is of the first of many steps
            assert value_of(problem, order) <= value * (1 + 1e-9)


@pytest.mark.parametrize(
    ("p", "m", "limits"),
    [
        (p, m, (1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75) if DEEP or p == 16 else (1.125, 1.375))
        for p in (16, 24, 32)
        for m in (3 * p, 4 * p, 8 * p)
        if DEEP or (p, m) in ((16, 48), (24, 72))
    ],
)
def test_in_a_v_rounds_have_the_published_bubbles_of_each_limit_of_memory(
    p: int, m: int, limits: tuple[float, ...]
) -> None:
    for row in rows_of("zero-bubble-memory.csv"):
        limit = float(row["limit"])
        if (row["p"], row["m"]) != (str(p), str(m)) or limit not in limits:
            continue
        problem = in_a_v(p, m, limit)
        value, order = min(orders_by_turns(problem), key=lambda found: found[0])
        assert 1 - problem.work[0] / value == pytest.approx(float(row["zb-v"]), abs=1e-6)
        if limit <= 1.5:  # more is more than they need
            used = max(peaks_of_order(problem, tuple(map(tuple, order))))
            assert used > 0.99 * problem.memory[0]


@pytest.mark.parametrize("limit", [1.125, 1.25, 1.375])
def test_in_tight_memory_a_search_of_a_v_goes_below_the_published_bubbles(limit: float) -> None:
    problem = in_a_v(16, 48, limit)
    (row,) = (
        row
        for row in rows_of("zero-bubble-memory.csv")
        if (row["p"], row["m"], float(row["limit"])) == ("16", "48", limit)
    )
    local = Local(problem, Random(0))
    local.run(0.0, lambda: local.passes < 16)
    assert local.best is not None
    assert 1 - problem.work[0] / value_of(problem, local.best) <= float(row["zb-v"]) + 1e-6


def test_memory_that_a_v_has_is_used_by_what_is_found() -> None:
    """As ``Schedule.kept`` counts it: each micro-batch from its forward to its last task."""
    costs = {"F": 9, "I": 9, "W": 6, "U": 0}
    for memory in (9, 10, 11):
        found = fxpipe.search_schedule(
            costs,
            16,
            devices=4,
            placement=fxpipe.vee,
            memory=memory,
            links=Link(1.0),
            flush=False,
            work=12,
        )
        assert max(found.schedule.kept().devices) == memory
