"""Short times whose tasks a solver puts into a better order."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.extensions.search.exact import PASSES, improve, reordered
from fxpipe.extensions.search.local import Local
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import Timeline, value_of
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import larger, listed, needs_ortools, problems, shared


@needs_ortools
@given(st.one_of(problems((1, 4), (1, 5)), shared(), larger()), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_window_only_changes_the_order_of_tasks_to_one_that_is_as_good(
    problem: Problem, seed: int
) -> None:
    random = Random(seed)
    order = listed(problem, random)
    other = reordered(Timeline(problem, order), random)
    assert other is not None
    assert [sorted(own) for own in other] == [sorted(own) for own in order]
    problem.schedule_of(other).verify()
    assert value_of(problem, other) <= value_of(problem, order) * (1 + 1e-9)


@needs_ortools
def test_windows_shorten_what_list_schedules_left() -> None:
    """8 devices, 12 micro-batches, and memory for half as many as there are devices."""
    forward = (15, 18, 9, 7, 12, 17, 15, 4)
    backward = (18, 10, 10, 4, 20, 15, 14, 9)
    weight = (10, 20, 11, 11, 12, 8, 15, 4)
    times = zip("FIW", (forward, backward, weight), strict=True)
    costs: dict[Key, float] = {(k, s): t for k, own in times for s, t in enumerate(own)}
    costs |= {("U", s): 0 for s in range(8)}
    problem = problems_of(Given(costs, 12, 8, None, None, 4, None, None, True))[0]
    local = Local(problem, Random(0))
    local.run(0.0, lambda: local.passes < 300)
    before = local.value
    improve(local, 0.0, lambda: local.passes < 300 + 8 * PASSES)
    assert local.best is not None
    assert local.value == value_of(problem, local.best) < before
