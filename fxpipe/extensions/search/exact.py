"""The exact search: a model for CP-SAT of ortools, which ``fxpipe[search]`` installs.

The model orders all tasks, or only those of a window: a short time, outside of which the order
stays as it is.
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

from fxpipe.extensions.search.bounds import lag, way_down
from fxpipe.extensions.search.local import Local
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.timing import Node, Timeline, value_of

LITERALS = 30_000
"""Problems with more pairs of tasks to order are left to the local search."""

_FINE = 5_000_000
"""Ticks in a device's work for a micro-batch, if times are rounded to ticks."""

_MOST = 20_000_000
"""The most ticks in a step, if all times are whole multiples of one."""

PASSES = 25
"""List schedules that count as much as one window."""

_WINDOW = 120
"""Tasks in a window, about."""

_LEAST = 6
"""Tasks of each device in a window, at least."""

_EFFORT = 0.25
"""The solver's limit for a window, in its deterministic time."""


def available() -> bool:
    """Whether ortools is installed."""
    return find_spec("ortools") is not None


def literals(problem: Problem) -> int:
    """How many pairs of tasks there are to order."""
    kinds = 2 if problem.whole else 3
    pairs = [kinds * len(held) * (kinds * len(held) - 1) // 2 for held in problem.held]
    return sum(pairs) * problem.microbatches**2


class Exact:
    """The model: a variable for each task's start, and a literal for which of two tasks is first.

    It has the tasks that start in a window of time; earlier tasks keep their times, and later ones
    their order. The memory in use at a task is a sum over the tasks before it, so it is linear in
    the literals. Times are whole numbers of ticks, rounded down, so the bound of a model with all
    tasks also holds for the problem.
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
        """Model the tasks that start from ``begin`` on and before ``end``. Orders must take less
        than ``below``, by default no longer than the timeline; ``bound`` is a known lower bound."""
        from ortools.sat.python import cp_model

        self.timeline, self.problem = timeline, timeline.problem
        self.model = model = cp_model.CpModel()
        inside = [node for node, start in timeline.starts.items() if begin <= start < end]
        # without flush, a model of all tasks lets each device begin when it likes
        self.moving = not self.problem.flush and len(inside) == len(timeline.starts)
        self.tick, exact = tick_of(replace(self.problem, flush=not self.moving))
        self.value = timeline.value if below is None else below
        most = self._ticks(self.value) if below is None else ceil(below / self.tick - 1e-6) - 1
        least = min(most, ceil(bound / self.tick - 1e-6)) if exact else 0
        self.longest = model.new_int_var(least, max(least, most), "")
        horizon = 2 * most + 2 + self._ticks(max(timeline.begun))
        self.starts = {node: model.new_int_var(0, horizon, "") for node in inside}
        if self.moving:
            model.add(self.starts[0, 0] == 0)  # all others come after it
        self.before: dict[tuple[Node, Node], Any] = {}
        self.parts: list[tuple[int, list[Node]]] = []
        self._link()
        for device, row in enumerate(timeline.rows):
            nodes = [node for node in row if node in self.starts]
            at = row.index(nodes[0]) if nodes else 0
            self.parts.append((at, nodes))
            if nodes:
                self._order(nodes)
                self._count(device, at, nodes)
                self._keep(device, at, nodes)
        model.minimize(self.longest)

    def solve(
        self, seconds: float, work: float, seed: int, workers: int = 2
    ) -> tuple[Order | None, float]:
        """Return the whole order with the best window, or None if none was found, and the bound.

        ``work`` limits the solver's deterministic time.
        """
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
        for row, (at, nodes) in zip(self.timeline.order, self.parts, strict=True):
            rank = dict.fromkeys(nodes, 0)
            for one, other in combinations(nodes, 2):
                literal = self.before[one, other]
                first = literal if isinstance(literal, int) else solver.boolean_value(literal)
                rank[other if first else one] += 1
            codes = tuple(code for code, _ in sorted(nodes, key=rank.__getitem__))
            rows.append(row[:at] + codes + row[at + len(nodes) :])
        return tuple(rows), bound

    def _ticks(self, time: float) -> int:
        return floor(time / self.tick + 1e-6)

    def _took(self, node: Node) -> int:
        return self._ticks(self.timeline.took[node[0]])

    def _link(self) -> None:
        """Order the tasks of each stage and kind, and send each micro-batch down and up."""
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

    def _order(self, nodes: list[Node]) -> None:
        """Add a literal for each two tasks of a device, and keep them from overlapping."""
        model, starts, before = self.model, self.starts, self.before
        for one, other in combinations(nodes, 2):
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
        for code, i in nodes:
            if (code, i + 1) in starts:
                # a task that comes after the next micro-batch's comes after this one's, too
                for third in nodes:
                    then, first = before.get(((code, i + 1), third)), before.get(((code, i), third))
                    if not isinstance(then, int | None) and not isinstance(first, int | None):
                        model.add_implication(then, first)
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[n], self._took(n), "") for n in nodes]
        )

    def _count(self, device: int, at: int, nodes: list[Node]) -> None:
        """Leave time before each task for all that comes before it on its device, and after it for
        the rest."""
        problem, timeline, row = self.problem, self.timeline, self.timeline.rows[device]
        begin: Any = 0
        free: Any = self._ticks(timeline.end(row[at - 1]) if at else timeline.begun[device])
        behind = timeline.after(device, at + len(nodes))
        if self.moving:
            begin = free = self.starts[row[0]]
            behind = problem.last[device]
        elif problem.flush and not at:
            free = self._ticks(way_down(problem, 0, problem.held[device][0]))
        whole = sum(map(self._took, nodes)) + self._ticks(behind)
        for node in nodes:
            others = (other for other in nodes if other != node)
            earlier = sum(self._took(other) * self.before[other, node] for other in others)
            start = self.starts[node]
            self.model.add(start >= free + earlier)
            self.model.add(self.longest + begin >= start + whole - earlier)

    def _keep(self, device: int, at: int, nodes: list[Node]) -> None:
        """Keep to the memory at each task that takes some."""
        problem, most = self.problem, self.problem.memory[device]
        sums = problem.summing[device]
        if problem.microbatches * problem.least_memory[device] + sums <= most:
            return
        row = self.timeline.rows[device]
        takes = {
            node: (problem.takes[node[0]] + problem.begins(*node), problem.begins(*node))
            for node in row
        }
        whole = all(float(x).is_integer() for pair in ((most,), *takes.values()) for x in pair)
        scale = 1.0 if whole else 1e6 / most
        units = {node: floor(more * scale + 1e-6) for node, (more, _) in takes.items()}
        peak = {
            node: floor(begins * scale + 1e-6) or units[node] for node, (_, begins) in takes.items()
        }
        level = sum(units[node] for node in row[:at])
        for node in nodes:
            if peak[node] > 0:
                others = (other for other in nodes if other != node and units[other])
                used = sum(units[other] * self.before[other, node] for other in others)
                used += level + peak[node]
                if not isinstance(used, int):
                    self.model.add(used <= ceil(most * scale - 1e-6))


def tick_of(problem: Problem) -> tuple[float, bool]:
    """The tick, and whether all times are whole multiples of it; else they are rounded down."""
    every = [*problem.forward, *problem.backward, *problem.weight, *problem.last]
    every += [*problem.down, *problem.up]
    times = [Fraction(str(time)) for time in every]
    parts = lcm(*(time.denominator for time in times))
    tick = Fraction(gcd(*(int(time * parts) for time in times)) or 1, parts)
    if not problem.flush:
        # the longest span may be a mean over as many devices
        tick /= lcm(*range(1, problem.devices + 1))
    if sum(times) * problem.microbatches <= _MOST * tick:
        return float(tick), True
    return max(problem.work) / problem.microbatches / _FINE, False


def precedes(one: int, i: int, other: int, j: int) -> bool:
    """Whether task (``one``, micro-batch i) comes before (``other``, j) in every order."""
    (s, kind), (u, behind) = divmod(one, 3), divmod(other, 3)
    if i > j or (kind == 2 and one != other):
        return False
    if kind == 0:
        return behind > 0 or s <= u
    return behind > 0 and s >= u


def improve(local: Local, enough: float, go_on: Callable[[], bool]) -> None:
    """Improve the best order window by window, until it takes at most ``enough`` or ``go_on()`` is
    false.

    Orders that take as long as the best are kept, too: the next window may gain by it.
    """
    timeline = Timeline(local.problem, local.first)
    while local.value > enough and go_on():
        local.passes += PASSES
        order = reordered(timeline, local.random)
        if order is not None and (value := value_of(local.problem, order)) <= local.value:
            local.offer(value, order)
            timeline = Timeline(local.problem, order)


def reordered(timeline: Timeline, random: Random) -> Order | None:
    """The best order that differs from the timeline's in a random window only, or None."""
    devices = timeline.problem.devices
    end = max(timeline.starts.values())
    width = end * max(_LEAST, _WINDOW / devices) * devices / len(timeline.starts)
    begin = random.uniform(-width / 2, max(0.0, end - width / 2))
    window = Exact(timeline, begin, begin + width)
    return window.solve(inf, _EFFORT, random.randrange(10**6), workers=1)[0]
