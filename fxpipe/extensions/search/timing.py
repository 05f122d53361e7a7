"""When the tasks of an order run, how long that takes, and how long it takes from each task on."""

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
        row[-1] + problem.took[codes[-1]] if codes else begin
        for row, codes, begin in zip(rows, order, release, strict=True)
    )
    return firsts, [time + last for time, last in zip(done, problem.last, strict=True)]


def starts_of(
    problem: Problem, rows: Sequence[Sequence[int]], release: Sequence[float] | None = None
) -> list[list[float]]:
    """Device → the starts of its tasks, each as early as possible, up to where a device gets
    stuck."""
    stages, placement = problem.stages, problem.placement
    took = problem.took
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
        now[device] = t
    return starts


def fits(problem: Problem, order: Order) -> bool:
    """Whether each device keeps to its memory."""
    most = zip(peaks(problem, order), problem.memory, strict=True)
    return all(peak <= memory * (1 + 1e-12) for peak, memory in most)


def peaks(problem: Problem, order: Order) -> list[float]:
    """Device → the most memory that it keeps at any time."""
    more = problem.takes
    kept = []
    for row in order:
        changes = [more[code] for code in row]
        if problem.sums:
            changes = [
                x for code, i in _numbered(row) for x in (problem.begins(code, i), more[code])
            ]
        kept.append(max(accumulate(changes, initial=0.0)))
    return kept


Node = tuple[int, int]
"""A task: its kind, as in an ``Order``, and its micro-batch."""


class Timeline:
    """When the tasks of an order start, and how long it takes from the end of each to the end.

    Without flush, the time to the end of a device counts from the device's start.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem, self.order = problem, order
        self.took = problem.took
        self.begun = [0.0] * problem.devices
        for _ in range(0 if problem.flush else problem.devices):
            _, ends = extents_of(problem, order, self.begun)
            self.begun = [end - min(ends) for end in ends]
        self.rows = [list(_numbered(row)) for row in order]
        self.starts: dict[Node, float] = {}
        self._start()
        self.behind: dict[Node, float] = {}
        self._look_behind()

    def needs(self, node: Node) -> tuple[Node, float] | None:
        """What a task waits for, besides the task before it, and how long after the end of that."""
        code, i = node
        stage, kind = divmod(code, 3)
        if kind == 0:
            return ((code - 3, i), self.problem.down[stage - 1]) if stage else None
        if kind == 1 and stage < self.problem.stages - 1:
            return (code + 3, i), self.problem.up[stage]
        return (code - 1, i), 0.0

    @property
    def value(self) -> float:
        """The time of the order, with devices that begin at ``begun``."""
        return max(self.end(node) + self.behind[node] for node in self.starts)

    def end(self, node: Node) -> float:
        return self.starts[node] + self.took[node[0]]

    def after(self, device: int, at: int) -> float:
        """The least time from the start of the task at a place in a device's row to the end."""
        row = self.rows[device]
        if at < len(row):
            return self.took[row[at][0]] + self.behind[row[at]]
        return self.problem.last[device] - (0.0 if self.problem.flush else self.begun[device])

    def _start(self) -> None:
        places, moved = [0] * len(self.rows), True
        now = list(self.begun)
        while moved:
            moved = False
            for device, row in enumerate(self.rows):
                for node in row[places[device] :]:
                    need = self.needs(node)
                    if need and need[0] not in self.starts:
                        break
                    start = max(now[device], self.end(need[0]) + need[1] if need else 0.0)
                    if not places[device] and not self.problem.flush:
                        self.begun[device] = start
                    self.starts[node], now[device] = start, start + self.took[node[0]]
                    places[device] += 1
                    moved = True

    def _look_behind(self) -> None:
        places = {node: (d, at) for d, row in enumerate(self.rows) for at, node in enumerate(row)}
        awaited = dict.fromkeys(self.starts, -inf)
        for node in reversed(self.starts):
            device, at = places[node]
            self.behind[node] = max(awaited[node], self.after(device, at + 1))
            if need := self.needs(node):
                other, more = need
                least = more + self.took[node[0]] + self.behind[node]
                awaited[other] = max(awaited[other], least)


def _numbered(row: tuple[int, ...]) -> Iterator[Node]:
    counts: dict[int, int] = {}
    for code in row:
        counts[code] = counts.get(code, -1) + 1
        yield code, counts[code]
