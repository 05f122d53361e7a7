"""When the tasks of an order run, how long that takes, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from fxpipe.extensions.search.problem import Order, Problem

_STILL = 4
"""``value_of`` ends after this many steps in a row without a shorter time."""


def value_of(problem: Problem, order: Order) -> float:
    """The time of an order that the problem minimizes; infinite if it gets stuck or keeps too much.

    Without flush, a device begins the next step as soon as it is done with one. All steps can keep
    to the longest time that a device takes for any of these steps, so the least of these counts.
    """
    if not fits(problem, order):
        return inf
    least, still = inf, 0
    release: Sequence[float] = [0.0] * problem.devices
    while still < _STILL:
        starts, ends = extents_of(problem, order, release)
        if problem.flush or max(ends) == inf:
            return max(ends)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        still = 0 if longest < least else still + 1
        least = min(least, longest)
        release = [end - min(ends) for end in ends]
    return least


def extents_of(
    problem: Problem, order: Order, release: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The start of each device's first task and the end of its last update, if devices begin at
    ``release`` and tasks start as early as they can. The ends are infinite if that gets stuck."""
    rows = starts_of(problem, order, release)
    firsts = [row[0] if row else inf for row in rows]
    if list(map(len, rows)) != list(map(len, order)):
        return firsts, [inf] * problem.devices
    done = (
        row[-1] + problem.times[codes[-1]][-1] if codes else begin
        for row, codes, begin in zip(rows, order, release, strict=True)
    )
    return firsts, [time + last for time, last in zip(done, problem.last, strict=True)]


def starts_of(
    problem: Problem, rows: Sequence[Sequence[int]], release: Sequence[float] | None = None
) -> list[list[float]]:
    """Device → the starts of its tasks, each as early as possible, up to where a device gets
    stuck."""
    stages, placement = problem.stages, problem.placement
    times = problem.times
    comes: list[list[float]] = [[] for _ in range(3 * stages)]
    counts = [0] * (3 * stages)
    starts: list[list[float]] = [[] for _ in rows]
    now = list(release or [0.0] * len(rows))
    waiting = set(range(len(rows)))
    while waiting:
        device = waiting.pop()
        row, t = rows[device], now[device]
        while len(starts[device]) < len(row):
            code = row[len(starts[device])]
            i = counts[code]
            if code and i >= len(comes[code]):
                break
            t = max(t, comes[code][i]) if code else t
            counts[code] += 1
            starts[device].append(t)
            t += times[code][i]
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
        now[device] = t
    return starts


def fits(problem: Problem, order: Order) -> bool:
    """Whether each device keeps to its memory."""
    most = zip(peaks_of_order(problem, order), problem.memory, strict=True)
    return all(peak <= memory * (1 + 1e-12) for peak, memory in most)


def peaks_of_order(problem: Problem, order: Order) -> list[float]:
    """Device → the most memory that it keeps at any time."""
    more = problem.takes
    kept = []
    for row in order:
        changes = [more[code] for code in row]
        if problem.sums:
            changes = [
                x for code, i in numbered(row) for x in (problem.begins(code, i), more[code])
            ]
        kept.append(max(accumulate(changes, initial=0.0)))
    return kept


Node = tuple[int, int]
"""A task: its kind, as in an ``Order``, and its micro-batch."""


def numbered(row: tuple[int, ...]) -> Iterator[Node]:
    """Yield the tasks of a device's order."""
    counts: dict[int, int] = {}
    for code in row:
        counts[code] = counts.get(code, -1) + 1
        yield code, counts[code]
