"""The exact search: a model for CP-SAT of ortools, which ``fxpipe[search]`` installs."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from itertools import combinations
from math import ceil, floor, gcd, inf, lcm
from typing import Any

from fxpipe.search.problem import Order, Problem

LITERALS = 30_000
"""Problems with more than so many pairs of tasks to order are left to the local search."""

_FINE = 5_000_000
"""Ticks of a device's work for a micro-batch, where times are no whole multiples of one."""

_MOST = 20_000_000
"""Ticks of a step, where times are."""


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

    Memory is linear in the literals: what a task finds in use is a sum over those before it. Times
    are whole numbers of ticks, rounded down, so that the model's bound is one of the problem.
    """

    def __init__(self, problem: Problem, value: float, bound: float) -> None:
        """For an order that is better than ``value``, where ``bound`` is known to hold."""
        from ortools.sat.python import cp_model

        self.problem = problem
        self.tick, exact = tick_of(problem)
        self.model = model = cp_model.CpModel()
        self.kinds = range(2 if problem.whole else 3)
        self.took = [
            self._ticks(times[s])
            for s in range(problem.stages)
            for times in (problem.forward, problem.backward, problem.weight)
        ]
        self.down, self.up = ([self._ticks(t) for t in ts] for ts in (problem.down, problem.up))
        most = ceil(value / self.tick - 1e-6) - 1
        least = min(most, ceil(bound / self.tick - 1e-6)) if exact else 0
        self.value = value
        self.objective = model.new_int_var(least, max(least, most), "")
        self.starts = {
            (3 * s + kind, i): model.new_int_var(0, 2 * most + 2, "")
            for s in range(problem.stages)
            for kind in self.kinds
            for i in range(problem.microbatches)
        }
        if not problem.flush:
            model.add(self.starts[0, 0] == 0)  # all others come behind it
        self.before: dict[tuple[int, int, int, int], Any] = {}
        self._link_stages()
        for device in range(problem.devices):
            self._order(device)
            self._keep(device)
            self._count_work(device)
        model.minimize(self.objective)

    def hint(self, order: Order) -> None:
        """Start from an order that is known."""
        places = {}
        for own in order:
            counts = dict.fromkeys(own, 0)
            for place, code in enumerate(own):
                places[code, counts[code]] = place
                counts[code] += 1
        for (one, i, other, j), literal in self.before.items():
            if not isinstance(literal, int):
                self.model.add_hint(literal, places[one, i] < places[other, j])

    def solve(self, seconds: float, work: float, seed: int) -> tuple[Order | None, float]:
        """An order that is better, if one was found, and the bound."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = 2
        if work < inf:
            solver.parameters.interleave_search = True
            solver.parameters.max_deterministic_time = work
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None, self.value
        bound = solver.best_objective_bound * self.tick
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        order = []
        for own in self.problem.held:
            rank = {task: task[1] for task in self._tasks(own)}
            for (one, i, other, j), literal in self.before.items():
                if (one, i) in rank:
                    first = literal if isinstance(literal, int) else solver.boolean_value(literal)
                    rank[(other, j) if first else (one, i)] += 1
            order.append(tuple(code for code, _ in sorted(rank, key=rank.__getitem__)))
        return tuple(order), bound

    def _ticks(self, time: float) -> int:
        return floor(time / self.tick + 1e-6)

    def _tasks(self, own: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        codes = [3 * s + kind for s in own for kind in self.kinds]
        return ((code, i) for code in codes for i in range(self.problem.microbatches))

    def _link_stages(self) -> None:
        """Tasks of a stage and kind come in order; and a micro-batch goes down and up."""
        problem, add, starts, took = self.problem, self.model.add, self.starts, self.took
        last = problem.stages - 1
        lag = 0
        for s in range(last, -1, -1):
            forward, back, weight = 3 * s, 3 * s + 1, 3 * s + 2
            lag += took[forward] + (self.down[s] + self.up[s] if s < last else 0)
            for i in range(problem.microbatches):
                for kind in self.kinds if i else ():
                    code = forward + kind
                    add(starts[code, i] >= starts[code, i - 1] + took[code])
                if s < last:
                    add(starts[forward + 3, i] >= starts[forward, i] + took[forward] + self.down[s])
                    add(starts[back, i] >= starts[back + 3, i] + took[back + 3] + self.up[s])
                add(starts[back, i] >= starts[forward, i] + lag)
                if 2 in self.kinds:
                    add(starts[weight, i] >= starts[back, i] + took[back])
            lag += took[back]

    def _order(self, device: int) -> None:
        """Of each two tasks of a device one comes first; whoever comes before a task comes before
        those behind it, too."""
        model, starts, took, m = self.model, self.starts, self.took, self.problem.microbatches
        own = self.problem.held[device]
        codes = [3 * s + kind for s in own for kind in self.kinds]
        for one, other in combinations(codes, 2):
            for i in range(m):
                for j in range(m):
                    literal: Any
                    if precedes(one, i, other, j):
                        literal = 1
                    elif precedes(other, j, one, i):
                        literal = 0
                    else:
                        literal = model.new_bool_var("")
                        a, b = starts[one, i], starts[other, j]
                        model.add(b >= a + took[one]).only_enforce_if(literal)
                        model.add(a >= b + took[other]).only_enforce_if(~literal)
                    self.before[one, i, other, j] = literal
                    if i:
                        self._implies(literal, self.before[one, i - 1, other, j])
                    if j:
                        self._implies(self.before[one, i, other, j - 1], literal)
        intervals = [
            model.new_fixed_size_interval_var(starts[code, i], took[code], "")
            for code, i in self._tasks(own)
        ]
        model.add_no_overlap(intervals)

    def _implies(self, one: Any, other: Any) -> None:
        if not isinstance(one, int) and not isinstance(other, int):
            self.model.add_implication(one, other)

    def _first(self, one: int, i: int, other: int, j: int) -> Any:
        """1 where the first task comes before the second, else 0."""
        if (one, i, other, j) in self.before:
            return self.before[one, i, other, j]
        return 1 - self.before[other, j, one, i]

    def _keep(self, device: int) -> None:
        """Wherever a task takes memory, what is in use fits."""
        problem, m = self.problem, self.problem.microbatches
        own, most = problem.held[device], problem.memory[device]
        if m * problem.least_memory[device] <= most:
            return
        values = [most, *(problem.saved[s] for s in own), *(problem.deferred[s] for s in own)]
        scale = 1.0 if all(float(v).is_integer() for v in values) else 1e6 / most
        takes = {}
        for s in own:
            saved, deferred = problem.saved[s], problem.deferred[s]
            for kind, more in enumerate((saved, deferred - saved, -deferred)):
                takes[3 * s + kind] = floor(more * scale + 1e-6)
        codes = [3 * s + kind for s in own for kind in self.kinds]
        for code, i in self._tasks(own):
            if takes[code] <= 0:
                continue
            level = takes[code] * (i + 1)
            for other in codes:
                if other != code and takes[other]:
                    level += takes[other] * sum(self._first(other, j, code, i) for j in range(m))
            if not isinstance(level, int):
                self.model.add(level <= ceil(most * scale - 1e-6))

    def _count_work(self, device: int) -> None:
        """Before a task there is time for all that comes before it on its device, and behind it,
        until the end, for the rest. What is least includes the updates."""
        problem, m, took = self.problem, self.problem.microbatches, self.took
        own = problem.held[device]
        if not own:
            return
        codes = [3 * s + kind for s in own for kind in self.kinds]
        head = sum(self.took[3 * s] + self.down[s] for s in range(own[0]))
        update = self._ticks(problem.last[device])
        begin = 0 if problem.flush else self.starts[3 * own[0], 0]
        whole = m * sum(took[code] for code in codes)
        self.model.add(self.starts[3 * own[0], 0] >= head)
        for code, i in self._tasks(own):
            earlier = took[code] * i
            for other in codes:
                if other != code and took[other]:
                    earlier += took[other] * sum(self._first(other, j, code, i) for j in range(m))
            start = self.starts[code, i]
            self.model.add(start >= earlier + (head if problem.flush else begin))
            self.model.add(self.objective + begin >= start + whole - earlier + update)


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
    if i > j or kind == 2:
        return False
    if kind == 0:
        return behind > 0 or s <= u
    return behind > 0 and s >= u
