"""Windows: CP-SAT puts the tasks of a short time into a better order, and leaves all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from math import ceil, floor, inf
from random import Random
from typing import Any

from fxpipe.search.exact import precedes, tick_of
from fxpipe.search.local import Local
from fxpipe.search.problem import Order, Problem
from fxpipe.search.timing import times_of, value_of

Node = tuple[int, int]
"""A task: its kind, as in an ``Order``, and its micro-batch."""

PASSES = 25
"""List schedules that count as much as one window."""

_TASKS = 120
"""Tasks of a window, about, and the least for each device."""

_LEAST = 6

_EFFORT = 0.25
"""What the solver may spend on a window, by its own measure."""


def improve(local: Local, enough: float, go_on: Callable[[], bool]) -> None:
    """Put one window of the best order after another into a better order, until the time is down
    to ``enough`` or ``go_on()`` says no.

    An order that takes as long as the best is gone on from, too: the next window may gain by it.
    """
    assert local.best is not None
    timeline = Timeline(local.problem, local.best)
    while local.value > enough and go_on():
        local.passes += PASSES
        order = timeline.reordered(local.random)
        if order is not None and (value := value_of(local.problem, order)) <= local.value:
            local.offer(value, order)
            timeline = Timeline(local.problem, order)


class Timeline:
    """When the tasks of an order start, and how long it takes from the end of each to the last.

    Where steps follow one another, the time to the end of a device counts from the device's start.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem, self.order = problem, order
        three = zip(problem.forward, problem.backward, problem.weight, strict=True)
        self.took = [time for times in three for time in times]
        self.begun = [0.0] * problem.devices
        for _ in range(0 if problem.flush else problem.devices):
            _, ends = times_of(problem, order, self.begun)
            self.begun = [end - min(ends) for end in ends]
        self.rows = [list(_numbered(own)) for own in order]
        self.starts: dict[Node, float] = {}
        self._start()
        self.behind: dict[Node, float] = {}
        self._look_behind()

    def reordered(self, random: Random) -> Order | None:
        """The order that is best, of those that only differ in a window that is drawn."""
        devices = self.problem.devices
        end = max(self.starts.values())
        width = end * max(_LEAST, _TASKS / devices) * devices / len(self.starts)
        begin = random.uniform(-width / 2, max(0.0, end - width / 2))
        return Window(self, begin, begin + width).solve(_EFFORT, random.randrange(10**6))

    def needs(self, node: Node) -> tuple[Node, float] | None:
        """What a task waits for, besides the task before it, and for how long after its end."""
        code, i = node
        stage, kind = divmod(code, 3)
        if kind == 0:
            return ((code - 3, i), self.problem.down[stage - 1]) if stage else None
        if kind == 1 and stage < self.problem.stages - 1:
            return (code + 3, i), self.problem.up[stage]
        return (code - 1, i), 0.0

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


class Window:
    """The model of the tasks that start in a time, and of what they wait for and is behind them.

    Starts are numbers, and which of two tasks of a device comes first a literal, as in ``Exact``.
    """

    def __init__(self, timeline: Timeline, begin: float, end: float) -> None:
        from ortools.sat.python import cp_model

        self.timeline, self.problem = timeline, timeline.problem
        self.model = model = cp_model.CpModel()
        self.tick, exact = tick_of(replace(self.problem, flush=True))
        inside = {node for node, start in timeline.starts.items() if begin <= start < end}
        rounded = 0 if exact else len(inside)
        value = max(timeline.end(node) + timeline.behind[node] for node in timeline.starts)
        most = self._ticks(value) + rounded
        self.longest = model.new_int_var(0, most, "")
        horizon = most + self._ticks(max(timeline.begun))
        self.starts = {node: model.new_int_var(0, horizon, "") for node in inside}
        self.before: dict[tuple[Node, Node], Any] = {}
        self.parts = []
        for device, row in enumerate(timeline.rows):
            own = [node for node in row if node in inside]
            at = row.index(own[0]) if own else 0
            self.parts.append((at, own))
            if own:
                self._wait(device, at, own)
                self._order(own)
                self._keep(device, at, own)
        for node in timeline.starts:
            need = timeline.needs(node)
            if need and need[0] in inside and node not in inside:
                follows = need[1] + timeline.took[node[0]] + timeline.behind[node]
                self._ends(need[0], self._took(need[0]) + self._ticks(follows))
        model.minimize(self.longest)

    def solve(self, effort: float, seed: int) -> Order | None:
        """The whole order, with the best that was found for the window."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = effort
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        rows = []
        for row, (at, own) in zip(self.timeline.order, self.parts, strict=True):
            rank = dict.fromkeys(own, 0)
            for one, other in combinations(own, 2):
                literal = self.before[one, other]
                first = literal if isinstance(literal, int) else solver.boolean_value(literal)
                rank[other if first else one] += 1
            codes = tuple(code for code, _ in sorted(own, key=rank.__getitem__))
            rows.append(row[:at] + codes + row[at + len(own) :])
        return tuple(rows)

    def _ticks(self, time: float) -> int:
        return round(time / self.tick)

    def _took(self, node: Node) -> int:
        return self._ticks(self.timeline.took[node[0]])

    def _ends(self, node: Node, more: Any) -> None:
        self.model.add(self.longest >= self.starts[node] + more)

    def _wait(self, device: int, at: int, own: list[Node]) -> None:
        """For what came before the window, and what is behind it."""
        timeline, row = self.timeline, self.timeline.rows[device]
        free = timeline.end(row[at - 1]) if at else timeline.begun[device]
        behind = self._ticks(timeline.after(device, at + len(own)))
        for node in own:
            start = self.starts[node]
            self.model.add(start >= self._ticks(free))
            self._ends(node, self._took(node) + behind)
            if need := timeline.needs(node):
                other, more = need
                if other in self.starts:
                    self.model.add(
                        start >= self.starts[other] + self._ticks(more) + self._took(other)
                    )
                else:
                    self.model.add(start >= self._ticks(timeline.end(other) + more))

    def _order(self, own: list[Node]) -> None:
        """One of each two comes first; whoever comes before a task, before those behind it."""
        model, starts, before = self.model, self.starts, self.before
        for one, other in combinations(own, 2):
            literal: Any = precedes(*one, *other)
            if not literal:
                literal = model.new_bool_var("")
                model.add_hint(literal, 1)
                late = starts[one] >= starts[other] + self._took(other)
                model.add(late).only_enforce_if(~literal)
            late = starts[other] >= starts[one] + self._took(one)
            model.add(late).only_enforce_if(literal)
            before[one, other] = literal
            before[other, one] = 0 if isinstance(literal, bool) else ~literal
        for one, other in combinations(own, 2):
            if one[0] == other[0]:
                for third in own:
                    if third[0] != one[0]:
                        first, then = before[other, third], before[one, third]
                        if not isinstance(first, int) and not isinstance(then, int):
                            model.add_implication(first, then)
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[n], self._took(n), "") for n in own]
        )

    def _keep(self, device: int, at: int, own: list[Node]) -> None:
        """What is in use fits, and there is time for all that comes before a task, and behind."""
        problem, timeline = self.problem, self.timeline
        takes: dict[int, float] = {}
        for s in problem.held[device]:
            saved, deferred = problem.saved[s], problem.deferred[s]
            takes |= {3 * s: saved, 3 * s + 1: deferred - saved, 3 * s + 2: -deferred}
        row, most = timeline.rows[device], problem.memory[device]
        limited = problem.microbatches * problem.least_memory[device] > most
        values = [most, *takes.values()]
        scale = 1.0 if all(float(v).is_integer() for v in values) else 1e6 / most
        level = sum(takes[code] for code, _ in row[:at])
        free = self._ticks(timeline.end(row[at - 1]) if at else timeline.begun[device])
        whole = sum(map(self._took, own)) + self._ticks(timeline.after(device, at + len(own)))
        for node in own:
            others = [one for one in own if one != node]
            earlier = sum(self._took(one) * self.before[one, node] for one in others)
            self.model.add(self.starts[node] >= free + earlier)
            self._ends(node, whole - earlier)
            if limited and takes[node[0]] > 0:
                used = sum(floor(takes[n[0]] * scale) * self.before[n, node] for n in others)
                used += floor((level + takes[node[0]]) * scale)
                if not isinstance(used, int):
                    self.model.add(used <= ceil(most * scale))


def _numbered(own: tuple[int, ...]) -> Iterator[Node]:
    counts: dict[int, int] = {}
    for code in own:
        counts[code] = counts.get(code, -1) + 1
        yield code, counts[code]
