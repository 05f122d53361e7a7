"""When the tasks of a given order run, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from fxpipe.search.problem import Order, Problem

_STILL = 4

_STEPS = 9
"""Steps of which the period is taken, where batches mix."""


def value_of(problem: Problem, order: Order) -> float:
    """The time that is to be least, of this order; infinite where it is stuck or keeps too much.

    Where steps follow one another, a device begins the next step as soon as it is done with one.
    The longest time that a device then takes is one that all steps can keep to; it comes down to
    the least from step to step.
    """
    if not fits(problem, order):
        return inf
    if problem.delay:
        return period_of(problem, order)
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
    rows = starts_of(problem, order, release)
    firsts = [row[0] if row else inf for row in rows]
    if list(map(len, rows)) != list(map(len, order)):
        return firsts, [inf] * problem.devices
    done = (
        row[-1] + problem.took[own[-1]] if own else begin
        for row, own, begin in zip(rows, order, release, strict=True)
    )
    return firsts, [time + last for time, last in zip(done, problem.last, strict=True)]


def period_of(problem: Problem, order: Order) -> float:
    """The time a batch where batches mix: the greatest that a task comes later, a step, than some
    steps before, which all steps can keep to; infinite where the order is stuck."""
    codes = 3 * problem.stages
    furthest = max(entry // codes for own in order for entry in own)
    steps = furthest + _STEPS
    rows = [[e % codes for n in range(steps) for e in own if e // codes <= n] for own in order]
    starts = starts_of(problem, rows)
    if list(map(len, starts)) != list(map(len, rows)):
        return inf
    periods = []
    for many in range(1, _STEPS):
        later = [
            row[-at] - row[-at - many * len(own)]
            for row, own in zip(starts, order, strict=True)
            for at in range(1, len(own) + 1)
        ]
        periods.append(max(later) / many)
    return min(periods)


def starts_of(
    problem: Problem, rows: Sequence[Sequence[int]], release: Sequence[float] | None = None
) -> list[list[float]]:
    """Device → the starts of its tasks, each as soon as it can be; as far as nothing gets stuck.
    Where batches mix, updates come right behind the last weight gradient of a batch."""
    m, stages, placement = problem.microbatches, problem.stages, problem.placement
    took = problem.took
    comes: list[list[float]] = [[] for _ in range(3 * stages)]
    counts = [0] * (3 * stages)
    starts: list[list[float]] = [[] for _ in rows]
    now = list(release or [0.0] * len(rows))
    waiting = set(range(len(rows)))
    while waiting:
        device = waiting.pop()
        own, t = rows[device], now[device]
        while len(starts[device]) < len(own):
            code = own[len(starts[device])]
            i = counts[code]
            if code and i >= len(comes[code]):
                break
            t = max(t, comes[code][i]) if code else t
            counts[code] += 1
            starts[device].append(t)
            t += took[code]
            stage, kind = divmod(code, 3)
            if kind == 1:
                comes[code + 1].append(t)
            if kind == 0 and stage == stages - 1:
                comes[code + 1].append(t)
            elif kind == 0:
                comes[code + 3].append(t + problem.down[stage])
                waiting.add(placement[stage + 1])
            elif kind == 1 and stage:
                comes[code - 3].append(t + problem.up[stage - 1])
                waiting.add(placement[stage - 1])
            if problem.delay and kind == 2 - problem.whole and (i + 1) % m == 0:
                t += problem.update[stage]
        now[device] = t
    return starts


def fits(problem: Problem, order: Order) -> bool:
    """Whether no device ever keeps more than it may."""
    most = zip(peaks(problem, order), problem.memory, strict=True)
    return all(peak <= memory * (1 + 1e-12) for peak, memory in most)


def peaks(problem: Problem, order: Order) -> list[float]:
    """Device → the most that it keeps."""
    sizes = zip(problem.saved, problem.deferred, strict=True)
    more = [each for a, b in sizes for each in (a, b - a, -b)]
    found = []
    for own in order:
        # what earlier batches have not let go of yet
        level = -sum(entry // len(more) * more[entry % len(more)] for entry in own)
        found.append(max(accumulate((more[e % len(more)] for e in own), initial=level)))
    return found
