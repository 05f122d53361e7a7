"""When the tasks of an order start, and what comes behind each."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fxpipe.search.problem import Order, Problem
from fxpipe.search.timing import times_of

Node = tuple[int, int]
"""A task: its kind, as in an ``Order``, and its micro-batch."""


class Timeline:
    """When the tasks of an order start, and how long it takes from the end of each to the last.

    Where steps follow one another, the time to the end of a device counts from the device's start.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem, self.order = problem, order
        self.took = problem.took
        self.begun = [0.0] * problem.devices
        for _ in range(0 if problem.flush else problem.devices):
            _, ends = times_of(problem, order, self.begun)
            self.begun = [end - min(ends) for end in ends]
        self.rows = [list(_numbered(own)) for own in order]
        self.starts: dict[Node, float] = {}
        self._start()
        self.behind: dict[Node, float] = {}
        self._look_behind()

    def needs(self, node: Node) -> tuple[Node, float] | None:
        """What a task waits for, besides the task before it, and for how long after its end."""
        code, i = node
        stage, kind = divmod(code, 3)
        if kind == 0:
            return ((code - 3, i), self.problem.down[stage - 1]) if stage else None
        if kind == 1 and stage < self.problem.stages - 1:
            return (code + 3, i), self.problem.up[stage]
        return (code - 1, i), 0.0

    @property
    def value(self) -> float:
        """What the order takes, from these begins on."""
        return max(self.end(node) + self.behind[node] for node in self.starts)

    def end(self, node: Node) -> float:
        return self.starts[node] + self.took[node[0]]

    def after(self, device: int, at: int) -> float:
        """How long it takes, at least, from the place in a device's row on."""
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


def _numbered(own: tuple[int, ...]) -> Iterator[Node]:
    counts: dict[int, int] = {}
    for code in own:
        counts[code] = counts.get(code, -1) + 1
        yield code, counts[code]
