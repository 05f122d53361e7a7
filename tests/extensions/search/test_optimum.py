"""Bounds and list schedules against the best of all orders."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.extensions.search.bounds import best_bound, chain_bounds, work_bounds
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import NumberedOrder, fits, value_of
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import (
    all_bounds,
    larger,
    listed,
    problem_of,
    problems,
    searched,
    shared,
)
from tests.oracles.every_order import Row, best_of_all, least_time


@given(problems((2, 2), (1, 3)))
@settings(max_examples=60)
def test_the_bound_is_not_above_the_best_order_nor_that_above_what_is_found(
    problem: Problem,
) -> None:
    best, found = best_of_all(problem), searched(problem)
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.value * (1 + 1e-9)


@pytest.mark.smoke
@given(problems((2, 3), (1, 2)))
@settings(max_examples=60)
def test_no_bound_of_any_kind_is_above_the_best_order_of_up_to_three_devices(
    problem: Problem,
) -> None:
    best = best_of_all(problem)
    for bound in all_bounds(problem):
        assert bound <= best * (1 + 1e-9), bound


def named(problem: Problem, order: Order) -> list[Row]:
    """The tasks of an order by name, updates left out."""
    return [
        tuple(
            (t.kind.replace("B", "I"), t.microbatch or 0, t.stage or 0)
            for t in row
            if t.kind != "U"
        )
        for row in problem.schedule_of(order).rows
    ]


@given(problems((1, 4), (1, 5)), st.integers(0, 10**6))
def test_an_order_is_worth_its_longest_way_or_greatest_mean(problem: Problem, seed: int) -> None:
    order = listed(problem, Random(seed))
    assert value_of(problem, order) == pytest.approx(least_time(problem, named(problem, order)))


def test_a_device_may_begin_late_where_steps_follow_one_another() -> None:
    """The second device ends late: of its weight gradients, which come last."""
    times: dict[Key, float] = {("F", 0): 10, "F": 1, "I": 1, ("W", 0): 1, "W": 9, "U": 0}
    given = Given(times, 4, 2, None, None, None, None, None, False)
    problem = problems_of(given)[0]
    order = ((0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 2), (3, 4, 3, 4, 3, 4, 3, 4, 5, 5, 5, 5))
    starts, ends = NumberedOrder(problem, order).extents([0.0, 0.0])
    first = max(end - start for start, end in zip(starts, ends, strict=True))
    assert value_of(problem, order) == least_time(problem, named(problem, order)) < first


def test_list_schedules_find_nearly_all_optima_of_small_problems() -> None:
    random = Random(5)
    above = []
    for _ in range(40):
        numbers = [random.randint(1, 9) for _ in range(23)]
        room = random.choice([1, 1.5, 2, inf])
        problem = problem_of(2, random.randint(2, 3), numbers, room, False, random.random() < 0.5)
        above.append(searched(problem).value / best_of_all(problem) - 1)
    assert min(above) >= -1e-9
    assert sum(each < 1e-9 for each in above) >= 38


def test_a_bound_counts_that_a_backward_in_part_may_leave_more_than_a_forward_saved() -> None:
    """Three forwards find room before any input gradient, though no three weight gradients do."""
    problem = Problem(
        microbatches=3,
        placement=(0, 1, 2),
        forward=(1, 5, 5),
        backward=(1, 5, 5),
        weight=(1, 1, 1),
        update=(0, 0, 0),
        down=(0, 0),
        up=(0, 0),
        saved=(1, 1, 1),
        deferred=(2, 0, 0),
        memory=(4, 9, 9),
    )
    order = ((0, 0, 0, 1, 2, 1, 2, 1, 2), (3, 3, 3, 4, 5, 4, 5, 4, 5), (6, 7, 8, 6, 7, 8, 6, 7, 8))
    assert fits(problem, order)
    assert best_bound(problem) <= value_of(problem, order) == 45


@given(shared())
@settings(max_examples=40)
def test_where_stages_share_devices_the_bounds_hold_too(problem: Problem) -> None:
    best, found = best_of_all(problem), searched(problem, 100)
    for bound in all_bounds(problem):
        assert bound <= best * (1 + 1e-9), bound
    assert best <= found.value * (1 + 1e-9)


def test_neither_rule_for_bounds_follows_from_the_other() -> None:
    random = Random(0)
    needed: set[str] = set()
    for _ in range(60):
        numbers = [random.randint(1, 9) for _ in range(29)]
        room = random.choice([1, 1.5, 2, 3])
        problem = problem_of(random.randint(2, 5), random.randint(2, 8), numbers, room, False, True)
        work, chain = max(work_bounds(problem)), max(chain_bounds(problem))
        needed.add("work" if work > chain else "chain")
    assert needed == {"work", "chain"}


@given(larger())
@settings(max_examples=40)
def test_no_bound_is_above_what_is_found(problem: Problem) -> None:
    found = searched(problem, 30)
    for bound in all_bounds(problem):
        assert bound <= found.value * (1 + 1e-9), bound
