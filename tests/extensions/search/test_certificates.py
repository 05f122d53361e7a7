"""Certificates: the checker follows what a search says of its schedule, and refuses more."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import VerificationError
from fxpipe.extensions.search import check
from fxpipe.extensions.search.bounds import Bound, chain_bounds, device_bounds
from fxpipe.extensions.search.certificate import Certificate
from fxpipe.extensions.search.listing import list_schedule
from fxpipe.extensions.search.local import given_policies
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.search import search_schedule
from fxpipe.extensions.simulator.costs import Key
from tests.extensions.search.problems import (
    UNEQUAL,
    all_bounds,
    larger,
    mixing,
    needs_ortools,
    problem_of,
    problems,
    searched,
    shared,
)


@pytest.fixture(scope="module")
def proven() -> Certificate:
    return search_schedule(UNEQUAL, 5, memory=4, work=300, exact=False).certificate


def test_a_certificate_that_was_changed_is_refused(proven: Certificate) -> None:
    assert proven.check() == ()
    first, *rest = proven.schedule.rows
    moved = replace(proven.schedule, rows=((first[0], first[2], first[1], *first[3:]), *rest))
    late = tuple(task for kind in "FIWU" for task in first if task.kind == kind)
    poor = replace(proven.schedule, rows=(late, *rest))
    faster = replace(proven.problem, forward=(1, 1, 1))
    for wrong in (
        replace(proven, value=proven.value - 0.5),
        replace(proven, bound=replace(proven.bound, time=proven.bound.time + 0.5)),
        replace(proven, bound=Bound(proven.value + 1, "solver")),
        replace(proven, schedule=moved),
        replace(proven, schedule=poor),
        replace(proven, schedule=fxpipe.schedules.zb_h2(3, 6)),
        replace(proven, problem=replace(proven.problem, memory=(1.5, 1.5, 1.0))),
        replace(proven, problem=faster),
    ):
        with pytest.raises(VerificationError):
            wrong.check()


def test_the_checker_shares_only_the_problem_with_the_search() -> None:
    tree = ast.parse(inspect.getsource(check))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {module for module in modules if module.startswith("fxpipe.extensions.search")}
    assert own == {"fxpipe.extensions.search.certificate", "fxpipe.extensions.search.problem"}


def test_no_rule_for_bounds_follows_from_the_others() -> None:
    """Each is strictly the best for some problem, so that none can be left out."""
    random = Random(0)
    needed: set[str] = set()
    for number in range(200):
        numbers = [random.randint(1, 9) for _ in range(29)]
        room = random.choice([1, 1.5, 2, 3])
        problem = problem_of(random.randint(2, 5), random.randint(2, 8), numbers, room, False, True)
        if number % 2:
            homes = tuple(s % 2 for s in range(problem.stages))
            problem = replace(problem, placement=homes, memory=(1000.0,) * 2)
            problem = replace(problem, memory=tuple(room * x for x in problem.least_memory))
        best = {bound.why: bound.time for bound in sorted(all_bounds(problem), key=time_of)}
        why = max(best, key=best.__getitem__)
        if best.pop(why) > max(best.values()) * (1 + 1e-9):
            needed.add(why)
    assert needed == {"work", "chain", "device"}


def time_of(bound: Bound) -> float:
    return bound.time


def test_bounds_of_stages_that_there_are_not_are_refused(proven: Certificate) -> None:
    """After the last input gradient of a stage, later stages need not have anything to do."""
    chain = next(b for b in chain_bounds(proven.problem) if b.stage == 0)
    assert replace(proven, bound=chain).check() == ()
    for wrong in (
        replace(chain, terms={**chain.terms, "end": 1}),
        replace(chain, terms={**chain.terms, "end": -1}),
        replace(chain, stage=-1),
        replace(chain, stage=3),
        replace(chain, time=nan),
    ):
        with pytest.raises(VerificationError):
            replace(proven, bound=wrong).check()


@given(st.one_of(problems((1, 4), (1, 6)), shared(), larger(), mixing((1, 4), (1, 6))))
def test_the_checker_follows_every_bound_and_refuses_more(problem: Problem) -> None:
    """Of a schedule that is far above all of them."""
    _, order, _ = list_schedule(
        problem, next(given_policies(problem)), [0.0] * problem.devices, inf
    )
    schedule, value = problem.schedule_of(tuple(map(tuple, order))), 10_000
    for bound in all_bounds(problem):
        assert Certificate(problem, schedule, value, bound).check() == ()
        more = replace(bound, time=bound.time * 1.001)
        with pytest.raises(VerificationError, match="only"):
            Certificate(problem, schedule, value, more).check()


@given(problems((1, 4), (1, 6)), st.sampled_from(["forward", "backward"]), st.integers(0, 3))
def test_the_checker_follows_bounds_that_rest_on_tasks_that_take_no_time(
    problem: Problem, task: str, stage: int
) -> None:
    some = tuple(0.0 if s == stage else time for s, time in enumerate(getattr(problem, task)))
    none: dict[str, Any] = {"weight": (0.0,) * problem.stages, task: some}
    problem = replace(problem, **none)
    schedule, value = searched(problem).schedule, 10_000
    for bound in all_bounds(problem):
        assert Certificate(problem, schedule, value, bound).check() == ()


@pytest.mark.parametrize("term", ["before", "behind"])
def test_the_checker_refuses_too_much_before_and_behind_tasks_of_microseconds(term: str) -> None:
    problem = scaled(problem_of(3, 4, [2, 5, 3, 7, 4], 2, False, True), 1e-6)
    schedule, value = searched(problem).schedule, 1.0
    found = [bound for bound in device_bounds(problem) if bound.terms[term]]
    assert found
    for bound in found:
        more = 1e-5 * bound.terms[term]
        terms = {**bound.terms, term: bound.terms[term] + more}
        wrong = replace(bound, time=bound.time + more, terms=terms)
        with pytest.raises(VerificationError, match="only"):
            Certificate(problem, schedule, value, wrong).check()


def scaled(problem: Problem, by: float) -> Problem:
    """A problem whose times are all multiplied."""
    times = ("forward", "backward", "weight", "update", "down", "up")
    found: dict[str, Any] = {
        name: tuple(by * time for time in getattr(problem, name)) for name in times
    }
    return replace(problem, **found)


@needs_ortools
def test_what_rests_on_the_solver_is_named() -> None:
    costs: dict[Key, float] = {"F": 7, ("F", 2): 1, "I": 5, ("I", 1): 9, ("I", 2): 8, "U": 0}
    costs |= {"W": 7, ("W", 1): 5, ("W", 2): 8}
    found = search_schedule(costs, 4, memory=2, work=60, exact=True)
    assert found.certificate.bound.why == "solver"
    assert "CP-SAT" in found.certificate.check()[0]
    assert found.gap == 0
