"""Bounds, list schedules and the solver against the best of all orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxpipe.extensions.search import exact
from fxpipe.extensions.search.bounds import best_bound
from fxpipe.extensions.search.certificate import Certificate
from fxpipe.extensions.search.placing import spread_bound
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import Timeline, extents_of, fits, period_of, value_of
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import (
    all_bounds,
    larger,
    listed,
    mixing,
    needs_ortools,
    problem_of,
    problems,
    searched,
    shared,
)
from tests.oracles.every_order import (
    Row,
    all_steps,
    best_of_all,
    best_of_all_steps,
    least_time,
    period,
)


@given(problems((2, 2), (1, 3)))
@settings(max_examples=60)
def test_the_bound_is_not_above_the_best_order_nor_that_above_what_is_found(
    problem: Problem,
) -> None:
    best, found = best_of_all(problem), searched(problem)
    assert found.bound.time <= best * (1 + 1e-9)
    assert best <= found.value * (1 + 1e-9)
    assert found.check() == ()


@given(problems((3, 3), (2, 2)))
@settings(max_examples=15)
def test_no_bound_of_any_kind_is_above_the_best_order_of_three_devices(problem: Problem) -> None:
    best = best_of_all(problem)
    for bound in all_bounds(problem):
        assert bound.time <= best * (1 + 1e-9), bound


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
    starts, ends = extents_of(problem, order, [0.0, 0.0])
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
    assert best_bound(problem).time <= value_of(problem, order) == 45


def timeline(found: Certificate) -> Timeline:
    order = found.problem.order_of(found.schedule)
    assert order is not None
    return Timeline(found.problem, order)


@given(shared())
@settings(max_examples=40)
def test_where_stages_share_devices_the_bounds_hold_too(problem: Problem) -> None:
    best, found = best_of_all(problem), searched(problem, 100)
    for bound in all_bounds(problem):
        assert bound.time <= best * (1 + 1e-9), bound
    assert best <= found.value * (1 + 1e-9)
    assert found.check() == ()
    if exact.available():
        model = exact.Exact(timeline(found), below=found.value + 1, bound=found.bound.time)
        order, least = model.solve(60, inf, 0)
        assert order is not None
        assert value_of(problem, order) == pytest.approx(best)
        assert least == pytest.approx(best)


@given(mixing((2, 2), (1, 2)).filter(lambda p: p.whole or p.microbatches == 1))
@settings(max_examples=40)
def test_where_batches_mix_the_bound_is_not_above_the_best_order_nor_that_above_what_is_found(
    problem: Problem,
) -> None:
    best, found = best_of_all_steps(problem), searched(problem)
    for bound in all_bounds(problem):
        assert bound.time <= best * (1 + 1e-9), bound
    assert best <= found.value * (1 + 1e-9)
    assert found.check() == ()


SLOW_LOOP = Problem(
    microbatches=1,
    placement=(0, 1, 2),
    forward=(3, 8, 9),
    backward=(2, 7, 3),
    weight=(0, 0, 0),
    update=(9, 1, 3),
    down=(6, 6),
    up=(8, 4),
    saved=(1, 1, 1),
    deferred=(0, 0, 0),
    memory=(inf, inf, inf),
    whole=True,
    flush=False,
    delay=2,
)
"""Its steps differ from one another by turns, in rounds of three."""


@given(mixing((2, 3), (1, 1)), st.integers(0, 10**6))
@settings(max_examples=40)
@example(SLOW_LOOP, None)
def test_steps_that_are_repeated_take_as_long_as_many_of_them_do_on_average(
    problem: Problem, seed: int | None
) -> None:
    every = [list(all_steps(problem, stage)) for stage in range(problem.stages)]
    rows: list[Row] = [
        (("I", -3, 0), ("F", 0, 0)),
        (("F", 0, 1), ("I", -1, 1)),
        (("I", -1, 2), ("F", 0, 2)),
    ]
    if seed is not None:
        rows = list(map(Random(seed).choice, every))
    back = 3 * problem.stages
    order = tuple(tuple(3 * s + "FIW".index(k) - back * i for k, i, s in row) for row in rows)
    assert period_of(problem, order) == pytest.approx(period(problem, rows))


def test_list_schedules_find_nearly_all_orders_that_steps_repeat_best() -> None:
    random = Random(5)
    above = []
    for _ in range(40):
        numbers = [random.randint(1, 9) for _ in range(23)]
        m, room = random.randint(1, 2), random.choice([1, 1.5, 2, 3, inf])
        problem = problem_of(2, m, numbers, room, m == 2, False)
        problem = replace(problem, delay=random.randint(1, 2))
        above.append(searched(problem, 100).value / best_of_all_steps(problem) - 1)
    assert min(above) >= -1e-9
    assert sum(each < 1e-9 for each in above) >= 38


@given(problems((3, 3), (1, 2)))
@settings(max_examples=20)
def test_the_bound_of_all_placements_is_not_above_the_best_of_any(problem: Problem) -> None:
    memory = (sum(problem.least_memory) * 2,) * 2
    least = inf
    for places in product((0, 1), repeat=3):
        if set(places) == {0, 1}:
            least = min(least, best_of_all(replace(problem, placement=places, memory=memory)))
    wide = replace(problem, memory=memory[:1] * 3, down=(0, 0), up=(0, 0))
    for bound in (*all_bounds(wide), spread_bound(wide, 2)):
        assert bound.time <= least * (1 + 1e-9), bound


@given(problems((2, 5), (1, 4)), st.integers(1, 3))
@settings(max_examples=40)
def test_work_is_spread_as_evenly_as_any_placement_can(problem: Problem, devices: int) -> None:
    def longest(places: tuple[int, ...]) -> float:
        times = []
        for device in set(places):
            own = [s for s, place in enumerate(places) if place == device]
            before = sum(problem.forward[: own[0]]) + sum(problem.down[: own[0]])
            each = [problem.forward[s] + problem.backward[s] + problem.weight[s] for s in own]
            update = 0 if problem.flush else sum(problem.update[s] for s in own)
            times.append(before * problem.flush + problem.microbatches * sum(each) + update)
        return max(times)

    best = min(map(longest, product(range(devices), repeat=problem.stages)))
    assert spread_bound(problem, devices).terms["longest"] == pytest.approx(best)


@needs_ortools
@given(larger())
@settings(max_examples=40)
def test_no_bound_is_above_the_optimum_of_the_solver(problem: Problem) -> None:
    """Whose own model is told of no bound."""
    found = searched(problem, 30)
    order, _ = exact.Exact(timeline(found), below=found.value + 1).solve(60, inf, 0)
    assert order is not None
    best = value_of(problem, order)
    for bound in all_bounds(problem):
        assert bound.time <= best * (1 + 1e-9), bound


@needs_ortools
@given(problems((2, 3), (2, 3)).filter(lambda p: p.stages * p.microbatches < 9))
@settings(max_examples=25)
def test_the_solver_ends_at_the_best_of_all_orders(problem: Problem) -> None:
    best, found = best_of_all(problem), searched(problem, 1)
    assert found.value >= best * (1 - 1e-9)
    model = exact.Exact(timeline(found), below=found.value, bound=found.bound.time)
    better, least = model.solve(60, inf, 0)
    value = found.value if better is None else value_of(problem, better)
    assert value == pytest.approx(best)
    assert least == pytest.approx(best)
