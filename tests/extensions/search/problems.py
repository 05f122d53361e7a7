"""Small problems of a search, drawn from numbers, and what is known of them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from random import Random

from hypothesis import strategies as st

from fxpipe.extensions.search.bounds import best_bound, chain_bounds, room, work_bounds
from fxpipe.extensions.search.listing import Habit, Policy, order_by_policy
from fxpipe.extensions.search.local import Local, delays_of, limits_of
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.search import Found
from fxpipe.extensions.simulator.costs import Key

UNEQUAL: dict[Key, float] = {
    ("F", 0): 2,
    ("F", 1): 1,
    ("F", 2): 3,
    "I": 2,
    ("I", 1): 4,
    "W": 1,
    "U": 0,
}


_GAPS = (0.0, 0.5, 1.0, 1e30)


def random_policy(problem: Problem, random: Random) -> Policy:
    """A policy of a random style, with the same gaps for all stages or different ones."""
    single = all(len(stages) <= 1 for stages in problem.held)
    share = random.choice((*(0.5, 0.7, 0.85, 1.0, 1.1, 1.25), inf))
    if random.random() < 0.4:
        more = random.choice((0, 1, 1, 2))
        rise = random.uniform(0.5, 2.0)
        limits = [
            min(room(problem, s), max(1, ceil(rise * (problem.stages - s))) + more)
            for s in range(problem.stages)
        ]
    else:
        limits = limits_of(problem, share)
    style = random.choice(
        ("input", "turns", "forward") if single else ("ideal", "ideal", "deep", "input")
    )
    alike = random.random() < 0.5
    shared = one_habit(random)
    habits = []
    for s, limit in enumerate(limits):
        gap, room_gap, hold = shared if alike else one_habit(random)
        habits.append(Habit(limit, *delays_of(problem, style, s, limit), gap, room_gap, hold))
    return tuple(habits)


def one_habit(random: Random) -> tuple[float, float, float]:
    return (
        random.choice(_GAPS),
        random.choice(_GAPS[:3]),
        random.choice((0.0, 0.0, 0.5, 1.0)),
    )


def listed(problem: Problem, random: Random) -> Order:
    """The order that a list schedule by drawn habits has."""
    policy = random_policy(problem, random)
    _, rows = order_by_policy(problem, policy, inf)
    return tuple(map(tuple, rows))


def problem_of(
    stages: int, microbatches: int, numbers: list[int], room: float, whole: bool, flush: bool
) -> Problem:
    """A stage a device, of times and bytes from a list that is gone through in turn."""
    turn = iter(numbers * 20)

    def some(count: int = stages) -> tuple[float, ...]:
        return tuple(next(turn) for _ in range(count))

    saved, deferred = some(), some()
    least = [max(a, c) for a, c in zip(saved, deferred, strict=True)]
    return Problem(
        microbatches,
        tuple(range(stages)),
        some(),
        some(),
        (0.0,) * stages if whole else some(),
        some(),
        some(stages - 1),
        some(stages - 1),
        saved,
        (0.0,) * stages if whole else deferred,
        tuple(max(room * a, most) for a, most in zip(saved, least, strict=True)),
        whole,
        flush,
    )


def problems(stages: tuple[int, int], microbatches: tuple[int, int]) -> st.SearchStrategy[Problem]:
    return st.builds(
        problem_of,
        st.integers(*stages),
        st.integers(*microbatches),
        st.lists(st.integers(1, 9), min_size=5, max_size=29),
        st.sampled_from([1, 1.5, 2, 2.5, 3, inf]),
        st.booleans(),
        st.booleans(),
    )


def all_bounds(problem: Problem) -> list[float]:
    return [*work_bounds(problem), *chain_bounds(problem)]


def searched(problem: Problem, passes: int = 300) -> Found:
    bound = best_bound(problem)
    local = Local(problem, Random(0))
    local.run(bound, lambda: local.passes < passes)
    assert local.best is not None
    schedule = problem.schedule_of(local.best).verify()
    return Found(schedule, local.value, bound, problem, {})


SHARED = [(0, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)]


@st.composite
def shared(draw: st.DrawFn) -> Problem:
    """Stages that share devices, few enough to try all orders."""
    placement = draw(st.sampled_from(SHARED))
    stages, devices = len(placement), max(placement) + 1
    microbatches = draw(st.integers(1, 2 if stages * devices <= 6 else 1))
    whole = stages * devices * microbatches > 4
    numbers = draw(st.lists(st.integers(1, 9), min_size=5, max_size=29))
    one = problem_of(stages, microbatches, numbers, 1, whole, draw(st.booleans()))
    memory = [0.0] * devices
    for home, most in zip(placement, one.memory, strict=True):
        memory[home] += most
    share = draw(st.sampled_from([1, 1.5, inf]))
    return replace(one, placement=placement, memory=tuple(share * most for most in memory))


@st.composite
def larger(draw: st.DrawFn) -> Problem:
    """Larger problems: one stage a device, two in turn, or the V."""
    devices = draw(st.integers(2, 3))
    placement = tuple(range(devices))
    placement += draw(st.sampled_from([(), placement, placement[::-1]]))
    stages = len(placement)
    numbers = draw(st.lists(st.integers(1, 9), min_size=5, max_size=29))
    shape = draw(st.integers(2, 4 if stages < 4 else 3)), draw(st.booleans()), draw(st.booleans())
    one = problem_of(stages, shape[0], numbers, 1, shape[1] or stages > 4, shape[2])
    least = replace(one, placement=placement, memory=(1000.0,) * devices).least_memory
    share = draw(st.sampled_from([1, 1.3, 2, inf]))
    return replace(one, placement=placement, memory=tuple(share * most for most in least))
