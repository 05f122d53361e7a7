"""Neighbours in a device's order that change places."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.extensions.search.bounds import best_bound
from fxpipe.extensions.search.local import Local, improve
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import NumberedOrder, fits, value_of
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import larger, listed, problems, shared


@given(st.one_of(problems((1, 4), (1, 5)), shared(), larger()), st.integers(0, 10**6))
@settings(max_examples=60)
def test_after_any_swaps_the_rows_are_timed_as_an_order_of_theirs_is(
    problem: Problem, seed: int
) -> None:
    random = Random(seed)
    before = listed(problem, random)
    rows = NumberedOrder(problem, before)
    assert rows.value == pytest.approx(value_of(problem, before))
    for _ in range(12):
        moves = list(rows.moves(random))
        if not moves:
            continue
        move = random.choice(moves)
        estimate = rows.estimate(*move)
        assert rows.swap(*move)
        assert rows.value >= estimate * (1 - 1e-9)
        order = rows.order()
        assert [sorted(own) for own in order] == [sorted(own) for own in before]
        assert fits(problem, order)
        problem.schedule_of(order).verify()
        if problem.flush:
            assert rows.value == pytest.approx(value_of(problem, order))


def test_swaps_reach_the_bound_of_a_v_that_list_schedules_do_not() -> None:
    random = Random(14)
    costs: dict[Key, float] = {(k, s): random.randint(8, 20) for k in "FIW" for s in range(12)}
    costs |= {("U", s): 0 for s in range(12)}
    problem = problems_of(Given(costs, 12, 6, fxpipe.vee, None, None, None, None, True))[0]
    local = Local(problem, Random(0))
    bound = best_bound(problem)
    local.run(bound, lambda: local.passes < 300)
    before = local.value
    improve(local, bound, lambda: local.passes < 500)
    assert local.best is not None
    assert before > local.value == value_of(problem, local.best) == bound
