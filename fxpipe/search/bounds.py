"""Lower bounds: times that no schedule of a problem can be below, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import floor

from fxpipe.search.problem import Problem

_CLOSE = 1e-9


@dataclass(frozen=True)
class Bound:
    """A time that no schedule can be below.

    Attributes:
        time: it.
        why: "work", "chain" or "solver"; see ``Certificate.reason``.
        stage: the stage that a chain goes through, or the first of the device that works.
        terms: what ``time`` is the sum of, by name, and numbers that these rest on.
    """

    time: float
    why: str
    stage: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)


def best_bound(problem: Problem) -> Bound:
    """The greatest of all that are known without a solver."""
    return max([*work_bounds(problem), *chain_bounds(problem)], key=lambda bound: bound.time)


def work_bounds(problem: Problem) -> Iterator[Bound]:
    """For each device: before its first task a micro-batch must reach it; then it has all its work
    to do, and before its first input gradient there is nothing but forwards, as many as find
    room, until that micro-batch comes back."""
    for device, own in enumerate(problem.held):
        if not own:
            continue
        head = way_down(problem, 0, own[0])
        wait = lag(problem, own[0]) - _way_up(problem, own[-1], own[0])
        wait -= problem.backward[own[-1]]
        idle = max(0.0, wait - _forwards(problem, device))
        terms = {
            "before": head if problem.flush else 0.0,
            "work": problem.work[device],
            "idle": idle,
            "update": problem.last[device],
        }
        yield Bound(sum(terms.values()), "work", own[0], terms)


def chain_bounds(problem: Problem) -> Iterator[Bound]:
    """For each stage: from its first forward to its last input gradient, with the way there and the
    way back to an earlier stage, where a weight gradient and an update follow."""
    for stage in range(problem.stages):
        between, terms = middle(problem, stage)
        for end in range(stage + 1):
            way = {
                "down": way_down(problem, 0 if problem.flush else end, stage),
                "between": between,
                "up": _way_up(problem, stage, end),
                "after": problem.weight[end] + problem.last[problem.placement[end]],
            }
            yield Bound(sum(way.values()), "chain", stage, {**way, "end": end, **terms})


def middle(problem: Problem, stage: int) -> tuple[float, dict[str, float]]:
    """The least time from a stage's first forward to its last input gradient.

    What else its device computes is left out. At most k micro-batches find room at once.
    """
    m, f, b, w = (
        problem.microbatches,
        problem.forward[stage],
        problem.backward[stage],
        problem.weight[stage],
    )
    r, k = lag(problem, stage), room(problem, stage)
    found: list[tuple[float, dict[str, float]]] = [(r + (m - 1) * max(f, b), {"rounds": 0.0})]
    for each, trip in _rounds(problem, stage):
        rounds = (m - 1) // each
        time = rounds * trip + r + (m - 1 - rounds * each) * max(f, b)
        found.append((time, {"rounds": float(rounds), "trip": trip}))
    first = max(0.0, r - b - k * f)
    if m <= k:
        found.append((m * (f + b) + first, {"first": first}))
    else:
        # Before the last forward the device makes room: with so many micro-batches in flight
        # besides, the input gradients of all others, and weight gradients as far as these do not
        # suffice. Behind it only so many input gradients can come until its own.
        options: list[tuple[float, dict[str, float]]] = []
        for more in range(k):
            made = _must_make(problem, stage, more)
            last = max(0.0, r - f - (more + 1) * b)
            options.append((made * w + last, {"weights": float(made), "last": last}))
        least, terms = min(options, key=lambda one: one[0])
        found.append((m * (f + b) + first + least, {"first": first, **terms}))
    return max(found, key=lambda one: one[0])


def _rounds(problem: Problem, stage: int) -> Iterator[tuple[int, float]]:
    """How many micro-batches later a forward has to wait for a trip, and how long that takes.

    The forward k later waits for the input gradient, as k are all that find room. Where what that
    leaves does not find room beside them, it waits for the weight gradient or the next input
    gradient, too. And some forward waits for the weight gradient, however many others are done.
    """
    saved, deferred = problem.saved[stage], problem.deferred[stage]
    b, w, r = problem.backward[stage], problem.weight[stage], lag(problem, stage)
    most, k = problem.memory[problem.placement[stage]], room(problem, stage)
    if k < problem.microbatches:
        crowded = deferred and k * saved + deferred > most * (1 + _CLOSE)
        yield k, r + (min(b, w) if crowded else 0.0)
    if deferred and most - saved < problem.microbatches * deferred:
        yield 1 + floor((most - saved) / deferred + _CLOSE), r + w


def room(problem: Problem, stage: int) -> int:
    """How many micro-batches a stage may have between forward and input gradient, at most."""
    return _count(problem, stage, problem.memory[problem.placement[stage]])


def lag(problem: Problem, stage: int) -> float:
    """The least time from the start of a micro-batch's forward to the end of its input gradient."""
    later = range(stage, problem.stages)
    ways = sum(problem.down[stage:]) + sum(problem.up[stage:])
    return sum(problem.forward[s] + problem.backward[s] for s in later) + ways


def way_down(problem: Problem, first: int, last: int) -> float:
    """From the start of a forward on one stage to its start on a later one."""
    return sum(problem.forward[first:last]) + sum(problem.down[first:last])


def _way_up(problem: Problem, first: int, last: int) -> float:
    """From the end of an input gradient on one stage to its end on an earlier one."""
    return sum(problem.backward[last:first]) + sum(problem.up[last:first])


def _forwards(problem: Problem, device: int) -> float:
    """The longest that a device can compute forwards alone: what takes the longest for its room
    goes first, whole micro-batches where it has one stage."""
    own, left, time = problem.held[device], problem.memory[device], 0.0
    if len(own) == 1:
        return room(problem, own[0]) * problem.forward[own[0]]
    m, saved = problem.microbatches, problem.saved
    for s in sorted(own, key=lambda s: -problem.forward[s] / max(saved[s], 1e-300)):
        count = m if m * saved[s] <= left else left / saved[s]
        time, left = time + count * problem.forward[s], left - count * saved[s]
    return time


def _must_make(problem: Problem, stage: int, more: int) -> int:
    """Weight gradients that come before a stage's last forward, at which so many other
    micro-batches are between forward and input gradient."""
    m, saved, deferred = problem.microbatches, problem.saved[stage], problem.deferred[stage]
    left = problem.memory[problem.placement[stage]] - (more + 1) * saved
    waiting = m - 1 - more  # have had their input gradients
    if problem.whole or not deferred or waiting * deferred <= left * (1 + _CLOSE):
        return 0
    return waiting - max(0, floor(left / deferred + _CLOSE))


def _count(problem: Problem, stage: int, most: float) -> int:
    saved = problem.saved[stage]
    if saved * problem.microbatches <= most:
        return problem.microbatches
    return max(1, floor(most / saved + _CLOSE))
