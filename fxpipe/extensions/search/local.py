"""List schedules by many policies, swaps of neighbours, and the best order that is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import ceil, floor, inf
from random import Random

from fxpipe.extensions.search.bounds import lag, room, way_down
from fxpipe.extensions.search.listing import NEVER, Habit, Policy, order_by_policy
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.rounds import orders_by_turns
from fxpipe.extensions.search.timing import NumberedOrder, value_of

FIRST, LAST = -1e9, 1e9
_GAPS = (0.0, 0.5, 1.0, NEVER)

_ROUNDS = 2
"""How many orders by rounds are tried however little time there is: one of these is always good
where memory is tight."""

_SWAPS = 5
"""Swaps that count as much as a list schedule."""

_TABU = 10, 30
"""For at least and at most how many further swaps two tasks are not swapped back."""


@dataclass
class Local:
    """The search for the best order of a problem.

    Attributes:
        problem: the problem.
        random: of the random choices.
        fitting: whether an order fits, by more than what the problem knows of memory.
        value: the least time of an order that fits.
        best: that order.
        refused: the fastest order that is faster and does not fit, and its time.
        passes: how many list schedules were made, and swaps in proportion.
    """

    problem: Problem
    random: Random
    fitting: Callable[[Order], bool] = lambda order: True
    value: float = inf
    best: Order | None = None
    refused: tuple[float, Order] | None = None
    passes: int = 0

    def offer(self, value: float, order: Order) -> bool:
        """Take an order if it is better than the best so far and fits; return whether it does."""
        if value >= self.value:
            return False
        order = tuple(map(tuple, order))
        if not self.fitting(order):
            if self.refused is None or value < self.refused[0]:
                self.refused = value, order
            return False
        self.value, self.best = value, order
        if self.refused is not None and value <= self.refused[0]:
            self.refused = None
        return True

    @property
    def first(self) -> Order:
        """The order to improve: the best one, or the fastest one if none fits."""
        order = self.refused[1] if self.best is None and self.refused else self.best
        assert order is not None
        return order

    def run(
        self, enough: float, go_on: Callable[[], bool], longer: Callable[[], bool] | None = None
    ) -> None:
        """Try the given policies until a time is at most ``enough`` or ``go_on()`` is false, but
        one at least if there is no order yet. Where devices hold several stages, rounds are tried
        in turn with them, these until ``longer()`` is false, and some in any case."""
        ways = deque([(self._listed(), go_on, 0)])
        if any(len(stages) > 1 for stages in self.problem.held):
            ways.appendleft((orders_by_turns(self.problem), longer or go_on, _ROUNDS))
        while ways:
            way, lasts, owed = ways.popleft()
            known = self.best is not None or self.refused is not None
            if known and self.value <= enough:
                return
            if known and not owed and not lasts():
                continue
            for value, order in islice(way, 1):
                ways.append((way, lasts, max(0, owed - 1)))
                self.passes += 1
                self.offer(value, order)  # type: ignore[arg-type]

    def _listed(self) -> Iterator[tuple[float, list[list[int]]]]:
        """Yield the times and orders of the given policies."""
        for policy in dict.fromkeys(given_policies(self.problem)):
            yield order_by_policy(self.problem, policy, self.value)


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


def given_policies(problem: Problem) -> Iterator[Policy]:
    """Yield fixed policies, the most promising first."""
    single = all(len(stages) <= 1 for stages in problem.held)
    styles = ("turns", "input", "forward") if single else ("ideal", "deep", "input", "forward")
    others = ((0.0, 0.0), (1.0, 0.0)) if single else ((0.0, 1.0), (0.0, 0.0))
    shares = ((share, ceil) for share in (1.0, 1.1, 0.85, 1.25, 0.7, inf))
    for share, rounded in ((1.0, floor), *shares):
        limits = limits_of(problem, share, rounded)
        for gap, (room_gap, hold), style in product(_GAPS, others, styles):
            yield tuple(
                Habit(limit, *delays_of(problem, style, s, limit), gap, room_gap, hold)
                for s, limit in enumerate(limits)
            )


def limits_of(problem: Problem, share: float, rounded: Callable[[float], int] = ceil) -> list[int]:
    """Stage → a limit of micro-batches in flight: this share of as many as keep the stage busy with
    forwards while one goes to the last stage and back. Rounded down, no forward delays the first
    input gradient on its way back."""
    limits = []
    for s in range(problem.stages):
        most = room(problem, s)
        if share < inf:
            pace = max(problem.forward[s], 1e-9 * lag(problem, s), 1e-300)
            wanted = share * (lag(problem, s) - problem.backward[s]) / pace
            slight = 1e-9 if rounded is ceil else -1e-9
            most = min(most, max(1, rounded(min(wanted, 1e9) - slight)))
        limits.append(most)
    return limits


def delays_of(problem: Problem, style: str, stage: int, limit: int) -> tuple[float, float]:
    """By how many micro-batches a style puts off a stage's forwards, and its input gradients."""
    if style == "input":
        return 0.0 if stage == 0 else -float(stage), FIRST
    if style == "forward":
        return float(stage), LAST
    if style == "deep":
        return FIRST / 2 * (1 + stage / problem.stages), FIRST
    if style == "turns":
        return 0.0, float(limit)
    pace = max(problem.work) / problem.microbatches or 1.0
    return way_down(problem, 0, stage) / pace, (
        (lag(problem, 0) - sum(problem.backward[:stage]) - sum(problem.up[:stage])) / pace
    )
