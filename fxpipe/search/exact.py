"""The exact search: a model for CP-SAT of ortools, which ``fxpipe[search]`` installs.

It is of all tasks of an order, or of a window: then the tasks of a short time are put into a better
order, and all others stay in theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import combinations
from math import ceil, floor, gcd, inf, lcm
from random import Random
from typing import Any

from fxpipe.search.bounds import lag, way_down
from fxpipe.search.local import Local
from fxpipe.search.problem import Order, Problem
from fxpipe.search.timing import Node, Timeline, value_of

LITERALS = 30_000
"""Problems with more than so many pairs of tasks to order are left to the local search."""

_FINE = 5_000_000
"""Ticks of a device's work for a micro-batch, where times are no whole multiples of one."""

_MOST = 20_000_000
"""Ticks of a step, where times are."""

PASSES = 25
"""List schedules that count as much as one window."""

_WINDOW = 120
"""Tasks of a window, about, and the least for each device."""

_LEAST = 6

_EFFORT = 0.25
"""What the solver may spend on a window, by its own measure."""


def available() -> bool:
    """Whether ortools is installed."""
    return find_spec("ortools") is not None


def literals(problem: Problem) -> int:
    """How many pairs of tasks there are to order."""
    kinds = 2 if problem.whole else 3
    pairs = [kinds * len(own) * (kinds * len(own) - 1) // 2 for own in problem.held]
    return sum(pairs) * problem.microbatches**2


class Exact:
    """The model: starts of tasks as numbers, and which of two tasks comes first as literals.

    It is of the tasks that start in a window of time; those before keep their times, and those
    behind their order. Memory is linear in the literals: what a task finds in use is a sum over
    those before it. Times are whole numbers of ticks, rounded down, so that the bound of a model of
    all tasks is one of the problem.
    """

    def __init__(
        self,
        timeline: Timeline,
        begin: float = -inf,
        end: float = inf,
        *,
        below: float | None = None,
        bound: float = 0.0,
    ) -> None:
        """For orders that take less than ``below``, or by default no longer than the timeline,
        where ``bound`` is known to hold."""
        from ortools.sat.python import cp_model

        self.timeline, self.problem = timeline, timeline.problem
        self.model = model = cp_model.CpModel()
        inside = [node for node, start in timeline.starts.items() if begin <= start < end]
        # where steps follow one another, devices then begin when they like
        self.moving = not self.problem.flush and len(inside) == len(timeline.starts)
        self.tick, exact = tick_of(replace(self.problem, flush=not self.moving))
        self.value = timeline.value if below is None else below
        most = self._ticks(self.value) if below is None else ceil(below / self.tick - 1e-6) - 1
        least = min(most, ceil(bound / self.tick - 1e-6)) if exact else 0
        self.longest = model.new_int_var(least, max(least, most), "")
        horizon = 2 * most + 2 + self._ticks(max(timeline.begun))
        self.starts = {node: model.new_int_var(0, horizon, "") for node in inside}
        if self.moving:
            model.add(self.starts[0, 0] == 0)  # all others come behind it
        self.before: dict[tuple[Node, Node], Any] = {}
        self.parts: list[tuple[int, list[Node]]] = []
        self._link()
        for device, row in enumerate(timeline.rows):
            own = [node for node in row if node in self.starts]
            at = row.index(own[0]) if own else 0
            self.parts.append((at, own))
            if own:
                self._order(own)
                self._count(device, at, own)
                self._keep(device, at, own)
        model.minimize(self.longest)

    def solve(
        self, seconds: float, work: float, seed: int, workers: int = 2
    ) -> tuple[Order | None, float]:
        """The whole order with the best that was found, if anything was, and the bound."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.max_deterministic_time = work
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = workers
        solver.parameters.interleave_search = workers > 1 and work < inf
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None, self.value
        bound = solver.best_objective_bound * self.tick
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        rows = []
        for row, (at, own) in zip(self.timeline.order, self.parts, strict=True):
            rank = dict.fromkeys(own, 0)
            for one, other in combinations(own, 2):
                literal = self.before[one, other]
                first = literal if isinstance(literal, int) else solver.boolean_value(literal)
                rank[other if first else one] += 1
            codes = tuple(code for code, _ in sorted(own, key=rank.__getitem__))
            rows.append(row[:at] + codes + row[at + len(own) :])
        return tuple(rows), bound

    def _ticks(self, time: float) -> int:
        return floor(time / self.tick + 1e-6)

    def _took(self, node: Node) -> int:
        return self._ticks(self.timeline.took[node[0]])

    def _link(self) -> None:
        """Tasks of a stage and kind come in order; and a micro-batch goes down and up."""
        timeline, add, starts = self.timeline, self.model.add, self.starts
        for node, start in starts.items():
            code, i = node
            if (code, i - 1) in starts:
                add(start >= starts[code, i - 1] + self._took(node))
            if code % 3 == 1 and (code - 1, i) in starts:
                stage = code // 3
                trip = lag(self.problem, stage) - self.problem.backward[stage]
                add(start >= starts[code - 1, i] + self._ticks(trip))
            if need := timeline.needs(node):
                other, more = need
                if other in starts:
                    add(start >= starts[other] + self._took(other) + self._ticks(more))
                else:
                    add(start >= self._ticks(timeline.end(other) + more))
        for node in timeline.starts:
            need = timeline.needs(node)
            if need and need[0] in starts and node not in starts:
                other, more = need
                follows = more + timeline.took[node[0]] + timeline.behind[node]
                add(self.longest >= starts[other] + self._took(other) + self._ticks(follows))

    def _order(self, own: list[Node]) -> None:
        """Of each two tasks of a device one comes first; whoever comes before a task comes before
        those behind it, too."""
        model, starts, before = self.model, self.starts, self.before
        for one, other in combinations(own, 2):
            literal: Any = int(precedes(*one, *other))
            if not literal:
                literal = model.new_bool_var("")
                model.add_hint(literal, 1)
                late = starts[other] >= starts[one] + self._took(one)
                model.add(late).only_enforce_if(literal)
                late = starts[one] >= starts[other] + self._took(other)
                model.add(late).only_enforce_if(~literal)
            before[one, other] = literal
            before[other, one] = 0 if isinstance(literal, int) else ~literal
        for code, i in own:
            if (code, i + 1) in starts:
                for third in own:
                    then, first = before.get(((code, i + 1), third)), before.get(((code, i), third))
                    if not isinstance(then, int | None) and not isinstance(first, int | None):
                        model.add_implication(then, first)
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[n], self._took(n), "") for n in own]
        )

    def _count(self, device: int, at: int, own: list[Node]) -> None:
        """Before a task there is time for all that comes before it on its device, and behind it,
        until the end, for the rest."""
        problem, timeline, row = self.problem, self.timeline, self.timeline.rows[device]
        begin: Any = 0
        free: Any = self._ticks(timeline.end(row[at - 1]) if at else timeline.begun[device])
        behind = timeline.after(device, at + len(own))
        if self.moving:
            begin = free = self.starts[row[0]]
            behind = problem.last[device]
        elif problem.flush and not at:
            free = self._ticks(way_down(problem, 0, problem.held[device][0]))
        whole = sum(map(self._took, own)) + self._ticks(behind)
        for node in own:
            others = (one for one in own if one != node)
            earlier = sum(self._took(one) * self.before[one, node] for one in others)
            start = self.starts[node]
            self.model.add(start >= free + earlier)
            self.model.add(self.longest + begin >= start + whole - earlier)

    def _keep(self, device: int, at: int, own: list[Node]) -> None:
        """Wherever a task takes memory, what is in use fits."""
        problem, most = self.problem, self.problem.memory[device]
        if problem.microbatches * problem.least_memory[device] <= most:
            return
        takes: dict[int, float] = {}
        for s in problem.held[device]:
            saved, deferred = problem.saved[s], problem.deferred[s]
            takes |= {3 * s: saved, 3 * s + 1: deferred - saved, 3 * s + 2: -deferred}
        whole = all(float(value).is_integer() for value in (most, *takes.values()))
        scale = 1.0 if whole else 1e6 / most
        units = {code: floor(more * scale + 1e-6) for code, more in takes.items()}
        level = sum(units[code] for code, _ in self.timeline.rows[device][:at])
        for node in own:
            if units[node[0]] > 0:
                others = (one for one in own if one != node and units[one[0]])
                used = sum(units[one[0]] * self.before[one, node] for one in others)
                used += level + units[node[0]]
                if not isinstance(used, int):
                    self.model.add(used <= ceil(most * scale - 1e-6))


def tick_of(problem: Problem) -> tuple[float, bool]:
    """A time of which all others are whole multiples, and whether that is so or they are rounded
    down."""
    given = [*problem.forward, *problem.backward, *problem.weight, *problem.last]
    given += [*problem.down, *problem.up]
    times = [Fraction(str(time)) for time in given]
    parts = lcm(*(time.denominator for time in times))
    tick = Fraction(gcd(*(int(time * parts) for time in times)) or 1, parts)
    if not problem.flush:
        # the longest span may be a mean over as many devices
        tick /= lcm(*range(1, problem.devices + 1))
    if sum(times) * problem.microbatches <= _MOST * tick:
        return float(tick), True
    return max(problem.work) / problem.microbatches / _FINE, False


def precedes(one: int, i: int, other: int, j: int) -> bool:
    """Whether a task comes before another in every order."""
    (s, kind), (u, behind) = divmod(one, 3), divmod(other, 3)
    if i > j or (kind == 2 and one != other):
        return False
    if kind == 0:
        return behind > 0 or s <= u
    return behind > 0 and s >= u


def improve(local: Local, enough: float, go_on: Callable[[], bool]) -> None:
    """Put one window of the best order after another into a better order, until the time is down
    to ``enough`` or ``go_on()`` says no.

    An order that takes as long as the best is gone on from, too: the next window may gain by it.
    """
    assert local.best is not None
    timeline = Timeline(local.problem, local.best)
    while local.value > enough and go_on():
        local.passes += PASSES
        order = reordered(timeline, local.random)
        if order is not None and (value := value_of(local.problem, order)) <= local.value:
            local.offer(value, order)
            timeline = Timeline(local.problem, order)


def reordered(timeline: Timeline, random: Random) -> Order | None:
    """The order that is best, of those that only differ in a window that is drawn."""
    devices = timeline.problem.devices
    end = max(timeline.starts.values())
    width = end * max(_LEAST, _WINDOW / devices) * devices / len(timeline.starts)
    begin = random.uniform(-width / 2, max(0.0, end - width / 2))
    window = Exact(timeline, begin, begin + width)
    return window.solve(inf, _EFFORT, random.randrange(10**6), workers=1)[0]
