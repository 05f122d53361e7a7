"""When the tasks of an order run, how long that takes, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from random import Random

from fxpipe.extensions.search.problem import Order, Problem

_STILL = 4
"""``value_of`` ends after this many steps in a row without a shorter time."""

Node = tuple[int, int]
"""A task: its kind, as in an ``Order``, and its micro-batch."""


def value_of(problem: Problem, order: Order) -> float:
    """The time of an order that the problem minimizes; infinite if it keeps too much.

    Without flush, a device begins the next step as soon as it is done with one. All steps can keep
    to the longest time that a device takes for any of these steps, so the least of these counts.
    """
    if not fits(problem, order):
        return inf
    rows = NumberedOrder(problem, order, swapped=False)
    if problem.flush:
        return rows.value
    least, still, begun = inf, 0, [0.0] * problem.devices
    while still < _STILL:
        longest, begun = rows.following(begun)
        still = 0 if longest < least else still + 1
        least = min(least, longest)
    return least


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


def numbered(row: tuple[int, ...]) -> Iterator[Node]:
    """Yield the tasks of a device's order."""
    counts: dict[int, int] = {}
    for code in row:
        counts[code] = counts.get(code, -1) + 1
        yield code, counts[code]


class NumberedOrder:
    """The tasks of an order as numbers, with the end of each and the time from its start to the end
    of all tasks; without flush, that to the end of a device counts from the device's start. The
    next numbers are one for each device, which stands for both its begin and its end, and ``none``,
    for no task.

    A block is a run of tasks on a longest path that follow one another on one device. Only swapping
    the first two or the last two tasks of a block can shorten that path (Nowicki and Smutnicki
    1996). If these must stay in their order, the next two are swapped.
    """

    def __init__(self, problem: Problem, order: Order, swapped: bool = True) -> None:
        """Number an order's tasks; ``swapped`` tells whether it is also to be swapped, for which
        devices that begin late are followed for a while, and the ways from tasks to the end."""
        self.problem = problem
        rows = [list(numbered(row)) for row in order]
        number = self._numbers(rows)
        self.codes = [code for code, _ in number]
        self.homes = [problem.placement[code // 3] for code in self.codes]
        self.count = count = len(number)
        ends = range(count, count + problem.devices)
        self.none = none = ends.stop
        self.took = [problem.times[code] for code in self.codes]
        self.needs, self.wait = [none] * count, [0.0] * count
        self.feeds, self.pause = [none] * count, [0.0] * count
        for node, task in number.items():
            if need := self._needs(node):
                self.needs[task], self.wait[task] = other, way = number[need[0]], need[1]
                if node[0] % 3 < 2:  # a weight gradient is on its device anyway
                    self.feeds[other], self.pause[other] = task, way
        self.size = [problem.takes[code] + problem.begins(code, i) for code, i in number]
        self.peak = [
            problem.begins(*node) or size for node, size in zip(number, self.size, strict=True)
        ]
        self.level = [0.0] * (none + 1)
        self.before, self.behind = [none] * (none + 1), [none] * (none + 1)
        for end, row in zip(ends, rows, strict=True):
            for one, other in pairwise((end, *(number[node] for node in row), end)):
                self.before[other], self.behind[one] = one, other
                if other < count:
                    self.level[other] = self.level[one] + self.size[other]
        self.end = [0.0] * none + [-inf]
        self.left = [0.0] * count + [*problem.last, -inf]
        self.sorted = list(range(count))
        """The tasks, each after what it waits for."""
        self.places = list(range(count))
        if swapped and not problem.flush:
            begun = [0.0] * problem.devices
            for _ in range(problem.devices):
                begun = self.following(begun)[1]
            begun = self.extents(begun)[0]
            self.end[count:none] = begun
            self.left[count:none] = [
                last - at for last, at in zip(problem.last, begun, strict=True)
            ]
        self._time(0, count if swapped else 0)

    def _numbers(self, rows: Sequence[Sequence[Node]]) -> dict[Node, int]:
        """Each task → its number; tasks have greater numbers than what they wait for."""
        number: dict[Node, int] = {}
        places, moved = [0] * len(rows), True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                for node in row[places[device] :]:
                    need = self._needs(node)
                    if need and need[0] not in number:
                        break
                    number[node], moved = len(number), True
                    places[device] += 1
        return number

    def _needs(self, node: Node) -> tuple[Node, float] | None:
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
        ends = range(self.count, self.none)
        return max(self.end[self.before[end]] + self.left[end] for end in ends)

    def extents(self, begun: Sequence[float]) -> tuple[list[float], list[float]]:
        """The start of each device's first task and the end of its last update, if devices begin
        at these times and tasks start as early as they can."""
        ends = range(self.count, self.none)
        self.end[self.count : self.none] = begun
        self._time(0, 0)
        firsts = [self.behind[end] for end in ends]
        starts = [
            max(self.end[e], self.end[self.needs[t]] + self.wait[t])
            for e, t in zip(ends, firsts, strict=True)
        ]
        done = zip(ends, self.problem.last, strict=True)
        return starts, [self.end[self.before[end]] + last for end, last in done]

    def following(self, begun: Sequence[float]) -> tuple[float, list[float]]:
        """The longest time that a device takes if they begin at these times, and when they begin
        the next step."""
        starts, ends = self.extents(begun)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        return longest, [end - min(ends) for end in ends]

    def order(self) -> Order:
        rows = []
        for end in range(self.count, self.none):
            row, task = [], self.behind[end]
            while task < self.count:
                row.append(self.codes[task])
                task = self.behind[task]
            rows.append(tuple(row))
        return tuple(rows)

    def moves(self, random: Random) -> Iterator[tuple[int, int]]:
        """Yield the neighbours on a random longest path that may be swapped."""
        way = self._way(random)
        for block, tasks in enumerate(way):
            pairs = [pair for pair in pairwise(tasks) if self._free(*pair)]
            if pairs and block:
                yield pairs[0]
            if pairs and block < len(way) - 1:
                yield pairs[-1]

    def estimate(self, one: int, other: int) -> float:
        """The longest path through two neighbours if they were swapped."""
        end, left, needs, feeds = self.end, self.left, self.needs, self.feeds
        first = max(end[self.before[one]], end[needs[other]] + self.wait[other]) + self.took[other]
        then = max(first, end[needs[one]] + self.wait[one])
        last = max(left[self.behind[other]], left[feeds[one]] + self.pause[one]) + self.took[one]
        return max(then + last, first + max(last, left[feeds[other]] + self.pause[other]))

    def swap(self, one: int, other: int) -> bool:
        """Swap two neighbours; return False if the second waits for the first by way of others."""
        before, behind, places = self.before, self.behind, self.places
        low, high = places[one], places[other]
        early, late, waits = [], [one], {one}
        for task in self.sorted[low + 1 : high]:
            if before[task] in waits or self.needs[task] in waits:
                waits.add(task)
                late.append(task)
            else:
                early.append(task)
        if self.needs[other] in waits:
            return False
        self.sorted[low : high + 1] = [*early, other, *late]
        for place in range(low, high + 1):
            places[self.sorted[place]] = place
        for task, then in pairwise((before[one], other, one, behind[other])):
            behind[task], before[then] = then, task
        self.level[one] = self.level[other]
        self.level[other] = self.level[before[other]] + self.size[other]
        self._time(low, high + 1)
        return True

    def _free(self, one: int, other: int) -> bool:
        """Whether the second of two neighbours may come first: no fixed order and no lack of memory
        forbids it."""
        if self.codes[one] == self.codes[other] or self.needs[other] == one:
            return False
        most = self.problem.memory[self.homes[one]] * (1 + 1e-12)
        peak = max(self.peak[other], self.size[other] + self.peak[one])
        return self.level[self.before[one]] + peak <= most

    def _way(self, random: Random) -> list[list[int]]:
        """A random longest path, as its blocks."""
        end, value, lasts = self.end, self.value, self.before[self.count : self.none]
        ways = zip(lasts, self.left[self.count : self.none], strict=True)
        task = random.choice([last for last, left in ways if end[last] + left == value])
        blocks = [[task]]
        while True:
            before, need, took = self.before[task], self.needs[task], self.took[task]
            waited = need != before and end[need] + self.wait[task] + took == end[task]
            if waited and not (end[before] + took == end[task] and random.random() < 0.5):
                task = need
                blocks.append([task])
            elif before < self.count:
                task = before
                blocks[-1].append(task)
            else:
                return [block[::-1] for block in reversed(blocks)]

    def _time(self, first: int, last: int) -> None:
        """Update the ends of the tasks from place ``first`` on, and the times from the start to the
        end of all for the tasks before place ``last``."""
        end, left, took = self.end, self.left, self.took
        before, needs, wait = self.before, self.needs, self.wait
        for task in self.sorted[first:]:
            free, there = end[before[task]], end[needs[task]] + wait[task]
            end[task] = (free if free > there else there) + took[task]
        behind, feeds, pause = self.behind, self.feeds, self.pause
        for task in reversed(self.sorted[:last]):
            free, there = left[behind[task]], left[feeds[task]] + pause[task]
            left[task] = (free if free > there else there) + took[task]
