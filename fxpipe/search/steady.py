"""Searches schedules whose batches mix on devices: the order that all steps repeat."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from math import ceil, inf
from random import Random

from fxpipe.errors import VerificationError
from fxpipe.search.bounds import best_bound, lag
from fxpipe.search.listing import Policy, list_schedule
from fxpipe.search.local import Local
from fxpipe.search.problem import Order, Problem
from fxpipe.search.timing import period_of, starts_of

_SETTLES = 2
"""Trips to the last stage and back, after which a list schedule is in its stride."""


def search_of(problem: Problem, random: Random) -> Local:
    """The local search for a problem."""
    return Steady(problem, random) if problem.delay else Local(problem, random)


@dataclass
class Steady(Local):
    """The local search for such an order: list schedules of many micro-batches in a row, of which
    each device repeats the tasks of one batch; and of one batch, each behind the one before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.real, own = self.problem, self.problem
        m, trip = own.microbatches, lag(own, 0)
        pace = max(own.work) / m or 1.0
        self.settled = ceil(_SETTLES * trip / pace / m) * m
        # the updates are parts of the last task of each micro-batch
        extra = [time / m for time in own.update]
        last = own.backward if own.whole else own.weight
        last = tuple(time + more for time, more in zip(last, extra, strict=True))
        own = replace(own, backward=last) if own.whole else replace(own, weight=last)
        self.problem = replace(
            own,
            microbatches=self.settled + 3 * m,
            update=(0.0,) * own.stages,
            flush=True,
            delay=0,
        )
        self.bound = best_bound(self.real).time

    def offer(self, value: float, order: Order) -> bool:
        """Take an order, if it is better, and if the schedule is valid with no greater delay."""
        if value >= self.value:
            return False
        try:
            if self.real.schedule_of(order).verify().delays[0] > self.real.delay:
                return False
        except VerificationError:
            return False
        return super().offer(value, order)

    def _outcome(self, policy: Policy, cutoff: float) -> float:
        release, m = [0.0] * self.problem.devices, self.real.microbatches
        self.passes += 1
        order = tuple(map(tuple, list_schedule(self.real, policy, release, inf)[1]))
        least = period_of(self.real, order)
        self.offer(least, order)
        for share in (0.0, self.random.random()):
            # without a pace, or at one that is too fast, batches come in crowds, and not alike
            pace = (self.bound + share * (self.value - self.bound)) / m
            mixes = m, self.real.delay, pace
            rows = list_schedule(self.problem, policy, release, inf, mixes)[1]
            repeated = self._repeated(rows)
            if repeated is not None:
                value = period_of(self.real, repeated)
                self.offer(value, repeated)
                least = min(least, value)
        return least

    def _repeated(self, rows: list[list[int]]) -> Order | None:
        """What all devices do from some time on, for one batch; None where some do more of one
        kind of task than of another."""
        problem = self.real
        m = problem.microbatches
        starts = starts_of(problem, rows)
        first = [at for at, code in enumerate(rows[problem.placement[0]]) if code == 0]
        time = starts[problem.placement[0]][first[self.settled + m]]
        found: list[list[tuple[int, int]]] = []
        for row, when in zip(rows, starts, strict=True):
            begin = sum(start < time for start in when)
            done = {code: row[:begin].count(code) for code in set(row)}
            tasks = []
            for code in row[begin : begin + len(row) * m // self.problem.microbatches]:
                tasks.append((code, done[code]))
                done[code] += 1
            if set(Counter(code for code, _ in tasks).values()) != {m} or len(tasks) % m:
                return None
            found.append(tasks)
        return _newest(problem, found)


def _newest(problem: Problem, tasks: list[list[tuple[int, int]]]) -> Order | None:
    """The order of such tasks, each a kind and a micro-batch. All are of the latest batches that
    they can be of, so that a device begins each step as late as it can: a task at the begin of a
    step becomes one at the end of the step before, if what it needs of other devices is no later.
    None where a forward stays one of an earlier batch, whose step would return its loss too early.
    """
    m, last = problem.microbatches, problem.stages - 1
    latest = max(i // m for own in tasks for _, i in own)
    back = {(code, i % m): latest - i // m for own in tasks for code, i in own}
    rows = [deque((code, i % m) for code, i in own) for own in tasks]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while back[row[0]] > 0:
                code, i = row[0]
                stage, kind = divmod(code, 3)
                needs = (stage - 1, stage + 1, -1)[kind]
                if 0 <= needs <= last and problem.placement[needs] != problem.placement[stage]:
                    if back[3 * needs + kind, i] >= back[code, i]:
                        break
                back[code, i] -= 1
                row.rotate(-1)
                moved = True
    codes = 3 * problem.stages
    if any(back[code, i] for code, i in back if code % 3 == 0):
        return None
    return tuple(tuple(task[0] + codes * back[task] for task in row) for row in rows)
