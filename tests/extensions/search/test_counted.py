"""What a problem counts of memory, where nothing but what stages save takes any."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random

import pytest

import fxpipe
from fxpipe.extensions.search.listing import order_by_policy
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import peaks_of_order
from fxpipe.extensions.simulator import Sizes
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import random_policy


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_problem_counts_what_a_simulation_does(flush: bool, whole: bool) -> None:
    random = Random(1)
    for placement, stages in product((None, fxpipe.vee, fxpipe.round_robin(2)), range(2)):
        count = 3 if placement is None else 6
        for _ in range(4):
            saved = {s: random.randint(1, 9) for s in range(count)}
            deferred = {s: random.randint(0, saved[s] + 3 * stages) for s in range(count)}
            sizes = Sizes(saved=saved, deferred={} if whole else deferred)
            costs: dict[Key, float] = {
                (k, s): random.randint(1, 5) for k in "FIW" for s in range(count)
            }
            costs.update({("B", s): random.randint(1, 9) for s in range(count)}, U=0)
            given = Given(costs, 5, 3, placement, whole, 60, sizes, None, flush)
            (problem,) = problems_of(given)
            order = order_by_policy(problem, random_policy(problem, random), inf)[1]
            rows = tuple(map(tuple, order))
            schedule = problem.schedule_of(rows)
            ran = schedule.simulate(costs, sizes=sizes, steps=1 if flush else None)
            assert [each.peak for each in ran.memory] == [*peaks_of_order(problem, rows)]
