"""When the tasks of a given order run, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxpipe.search.problem import Order, Problem

_STILL = 4


def value_of(problem: Problem, order: Order) -> float:
    """The time that is to be least, of this order; infinite where it is stuck or keeps too much.

    Where steps follow one another, a device begins the next step as soon as it is done with one.
    The longest time that a device then takes is one that all steps can keep to; it comes down to
    the least from step to step.
    """
    if not fits(problem, order):
        return inf
    least, still = inf, 0
    release: Sequence[float] = [0.0] * problem.devices
    while still < _STILL:
        starts, ends = times_of(problem, order, release)
        if problem.flush or max(ends) == inf:
            return max(ends)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        still = 0 if longest < least else still + 1
        least = min(least, longest)
        release = [end - min(ends) for end in ends]
    return least


def times_of(
    problem: Problem, order: Order, release: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Device → the start of its first task and the end of its last update, if devices begin when
    they are released and each task comes as soon as it can. Infinite ends where it gets stuck."""
    m, stages, placement = problem.microbatches, problem.stages, problem.placement
    ready = [[inf] * m for _ in range(3 * stages)]
    ready[0] = [0.0] * m
    took = [time for s in range(stages) for time in _times(problem, s)]
    counts, places = [0] * (3 * stages), [0] * problem.devices
    now, starts = list(release), [inf] * problem.devices
    waiting = set(range(problem.devices))
    while waiting:
        device = waiting.pop()
        own, t, at = order[device], now[device], places[device]
        while at < len(own) and ready[own[at]][counts[own[at]]] < inf:
            code = own[at]
            i = counts[code]
            counts[code] += 1
            t = max(t, ready[code][i])
            if not at:
                starts[device] = t
            t += took[code]
            at += 1
            stage, kind = divmod(code, 3)
            if kind == 1:
                ready[code + 1][i] = t
            if kind == 0 and stage == stages - 1:
                ready[code + 1][i] = t
            elif kind == 0:
                ready[code + 3][i] = t + problem.down[stage]
                waiting.add(placement[stage + 1])
            elif kind == 1 and stage:
                ready[code - 3][i] = t + problem.up[stage - 1]
                waiting.add(placement[stage - 1])
        now[device], places[device] = t, at
    if any(at < len(own) for at, own in zip(places, order, strict=True)):
        return starts, [inf] * problem.devices
    return starts, [t + last for t, last in zip(now, problem.last, strict=True)]


def fits(problem: Problem, order: Order) -> bool:
    """Whether no device ever keeps more than it may."""
    for own, most in zip(order, problem.memory, strict=True):
        level = 0.0
        for code in own:
            stage, kind = divmod(code, 3)
            saved, deferred = problem.saved[stage], problem.deferred[stage]
            level += (saved, deferred - saved, -deferred)[kind]
            if level > most * (1 + 1e-12):
                return False
    return True


def _times(problem: Problem, stage: int) -> tuple[float, float, float]:
    return problem.forward[stage], problem.backward[stage], problem.weight[stage]
