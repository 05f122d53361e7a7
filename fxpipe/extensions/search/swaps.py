"""Swaps: a tabu search that swaps neighbours in a device's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from random import Random

from fxpipe.extensions.search.local import Local
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.timing import Node, extents_of, numbered, value_of

_SWAPS = 5
"""Swaps that count as much as a list schedule."""

_TABU = 10, 30
"""For at least and at most how many further swaps two tasks are not swapped back."""


class NumberedOrder:
    """The tasks of an order as numbers, with the end of each and the time from its start to the end
    of all tasks; without flush, that to the end of a device counts from the device's start. The
    next numbers are one for each device, which stands for both its begin and its end, and ``none``,
    for no task.

    A block is a run of tasks on a longest path that follow one another on one device. Only swapping
    the first two or the last two tasks of a block can shorten that path (Nowicki and Smutnicki
    1996). If these must stay in their order, the next two are swapped.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem = problem
        begun = [0.0] * problem.devices
        for _ in range(0 if problem.flush else problem.devices):
            _, ended = extents_of(problem, order, begun)
            begun = [end - min(ended) for end in ended]
        if not problem.flush:
            begun, _ = extents_of(problem, order, begun)
        rows = [list(numbered(row)) for row in order]
        number = self._numbers(rows)
        self.codes = [code for code, _ in number]
        self.homes = [problem.placement[code // 3] for code in self.codes]
        self.count = count = len(number)
        ends = range(count, count + problem.devices)
        self.none = none = ends.stop
        self.took = [problem.times[code][i] for code, i in number]
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
        self.end = [0.0] * count + begun + [-inf]
        late = zip(problem.last, begun, strict=True)
        lasts = [last - (0.0 if problem.flush else begin) for last, begin in late]
        self.left = [0.0] * count + lasts + [-inf]
        self.sorted = list(range(count))
        """The tasks, each after what it waits for."""
        self.places = list(range(count))
        self._time(0, count)

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


def improve(local: Local, enough: float, go_on: Callable[[], bool]) -> None:
    """Swap tasks, from the best order on, until its time is at most ``enough`` or ``go_on()`` is
    false. Two tasks are not swapped back for a while, unless that gives a new best order."""
    problem, random = local.problem, local.random
    rows = NumberedOrder(problem, local.first)
    best, step = rows.value, 0
    until: dict[tuple[int, int], int] = {}
    while local.value > enough and go_on():
        local.passes += 1
        for _ in range(_SWAPS):
            step += 1
            times = {pair: rows.estimate(*pair) for pair in rows.moves(random)}
            allowed = [p for p, time in times.items() if time < best or until.get(p, 0) < step]
            least = min((times[pair] for pair in allowed), default=inf)
            chosen = [pair for pair in allowed if times[pair] == least] or list(times)
            if not chosen:
                continue  # another longest path may have some
            one, other = random.choice(chosen)
            if rows.swap(one, other):
                until[other, one] = step + random.randint(*_TABU)
                if rows.value < best:
                    order = rows.order()
                    local.offer(value_of(problem, order), order)
                    if local.fitting(order):
                        best = rows.value
