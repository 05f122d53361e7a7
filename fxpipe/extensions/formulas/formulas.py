"""Closed forms of what a schedule takes, in the numbers of devices p, of micro-batches m and of
stages a device v, and in the times of tasks T_F, T_B …: sums of products of these, and of a part of
p rounded down, with the simulator's exact values at every p and m up to a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

import sympy
from sympy import QQ
from sympy.polys.matrices import DomainMatrix

from fxpipe.arguments import check_whole
from fxpipe.errors import FxpipeError
from fxpipe.extensions.simulator import simulate_schedule
from fxpipe.ir.recipe import Recipe, round_robin
from fxpipe.ir.schedule import Schedule

P, M, V, T = sympy.symbols("p m v T", integer=True, positive=True)
EVEN, WHOLE = (sympy.Eq(sympy.Mod(each, by), 0) for each, by in ((P, 2), (M, P)))
RANGES = (
    (sympy.true, P > 2, EVEN, EVEN & (P > 2)),
    (sympy.true, M >= P, M >= 2 * P - 1, M >= 2 * P, WHOLE, WHOLE & (M >= 2 * P)),
)
"""Where a form may hold: one of each; the first ones for which there is a form are taken."""
PLAIN = (sympy.Integer(1), P, M, P * M)
BASES: Sequence[Sequence[Any]] = (
    PLAIN,
    (*PLAIN, V, P * V, M * V, P * M * V, 1 / V, P / V),
    *((*PLAIN, sympy.floor((P + rest) / n)) for n in (2, 3) for rest in range(n)),
)
"""What a form is a sum of."""
TIMES = ((1, 1, 1), (3, 2, 1), (2, 5, 1), (5, 3, 2), (1, 4, 3), (2, 1, 5))
"""Times of a forward and of the halves of a backward, with which forms are found."""
Point = tuple[int, int, int]
Values = Mapping[tuple[Point, tuple[int, ...]], Any]
"""A figure for p, m and v, and for the values of symbols."""


@dataclass(frozen=True)
class Formula:
    """A figure in closed form: a sympy expression ``form`` that holds ``where`` a sympy condition
    does and there is a schedule, checked for so many pairs of p and m, ``points``; or None, and
    ``why`` there is none."""

    form: Any
    where: Any = sympy.true
    points: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.form is None:
            return f"none: {self.why}"
        where = "" if self.where == sympy.true else f", where {self.where}"
        return f"{self.form}{where} (checked for {self.points} pairs of p and m)"


@dataclass(frozen=True)
class Formulas:
    """The ``makespan`` until the last micro-batch is through, or of a step in the long run if
    batches overlap; the ``bubble``, the share of the devices' time that is idle in it; and the most
    micro-batches, of its whole share, that are ``kept`` by a device for backward."""

    makespan: Formula
    bubble: Formula
    kept: Formula

    def __str__(self) -> str:
        return "\n".join(f"{name:9} {formula}" for name, formula in vars(self).items())


def formulas(recipe: Recipe, *, most: int = 8) -> Formulas:
    """The closed forms of a recipe's schedules, checked for 2 to ``most`` devices and 1 to twice as
    many micro-batches: for any times, else for weight gradients that take no longer than forwards
    and input gradients, else where these three take T. Raises InputError if ``most`` is below 5.
    """
    check_whole("most", most, 5)
    made = [*map(_of, _schedules(recipe, most))]
    return next((each for each in made if each.makespan.form is not None), made[-1])


def _of(schedules: Mapping[Point, Schedule]) -> Formulas:
    """The closed forms of schedules."""
    fullest = {at: Fraction(max(s.kept().devices), at[2]) for at, s in schedules.items()}
    kept = _found({(at, (1,)): each for at, each in fullest.items()}, [1])
    letters = "FIW" if any("I" in each.kinds for each in schedules.values()) else "FB"
    symbols = [sympy.Symbol(f"T_{letter}", positive=True) for letter in letters]
    times = [each[: len(letters)] for each in TIMES[: 3 * len(letters) - 3]]
    spans = {(a, t): _span(s, t) for (a, s), t in product(schedules.items(), times)}
    condition, found = sympy.true, _found(spans, symbols)
    if letters == "FIW" and found.form is None:
        condition = (symbols[2] <= symbols[0]) & (symbols[2] <= symbols[1])
        found = _found({at: x for at, x in spans.items() if at[1][2] <= min(at[1])}, symbols)
    if letters == "FIW" and found.form is None:
        condition, symbols = sympy.true, [T]
        found = _found({at: x for at, x in spans.items() if {*at[1]} == {1}}, symbols)
    if found.form is None:
        return Formulas(found, found, kept)
    chunks = {v for _, _, v in schedules}
    v = V if len(chunks) > 1 else chunks.pop()
    work = M * v * sum(3 * symbols if symbols == [T] else symbols)
    makespan = replace(found, where=sympy.And(found.where, condition))
    return Formulas(makespan, replace(makespan, form=sympy.factor(1 - work / found.form)), kept)


def _schedules(recipe: Recipe, most: int) -> tuple[Mapping[Point, Schedule], ...]:
    """p, m and v → schedule: with 1 to 4 stages a device, if it is for each number of them, placed
    round robin; and with as many as the recipe has."""
    made: dict[Point, Schedule] = {}
    several = recipe.place(2) == round_robin(2)(2)
    for each in (recipe, *(recipe.placed(round_robin(v)) for v in range(1, 5 if several else 1))):
        for p, m in product(range(2, most + 1), range(1, 2 * most + 1)):
            with suppress(FxpipeError):  # it may not be for so many
                made[p, m, each.stages(p) // p] = each(p, m).verify()
    own = {at: s for at, s in made.items() if at[2] == recipe.stages(2) // 2}
    return (made, own) if len({v for _, _, v in made}) == 4 else (own,)


def _span(schedule: Schedule, times: tuple[int, ...]) -> float:
    """The makespan for times of a forward, and of a backward or its halves."""
    costs = {"F": times[0], **dict(zip("BIW", (sum(times[1:]), *times[1:]), strict=False))}
    made = simulate_schedule(schedule, {kind: costs.get(kind, 0) for kind in schedule.kinds})
    return made.steady.period if made.steps > 1 else made.through


def _found(values: Values, symbols: Sequence[Any]) -> Formula:
    """The form that has these values, where it may hold most widely."""
    for of_p, of_m, basis in product(*RANGES, BASES):
        within = sympy.lambdify((P, M), of_p & of_m)
        held = {at: value for at, value in values.items() if within(*at[0][:2])}
        if (form := _solved(held, basis, symbols)) is not None:
            points = {(p, m) for (p, m, _), _ in held}
            return Formula(sympy.factor(form), of_p & of_m, len(points))
    return Formula(None, why="no sum of products of p, m and v has its values")


def _solved(values: Values, basis: Sequence[Any], symbols: Sequence[Any]) -> Any:
    """The sum of products of the basis and of symbols that has these values, found from a few of
    them; None if none has, or if they are too few to tell."""
    of = sympy.lambdify((P, M, V), list(basis), "math")
    products = {at: [Fraction(x) for x in of(*map(Fraction, at))] for at, _ in values}
    least = 2 + sum(not term.has(M, V) for term in basis), 4 if basis[-1].has(V) else 1
    if any(len({at[i] for at in products}) < few for i, few in zip((0, 2), least, strict=True)):
        return None
    rows = [
        [*(time * x for time in times[: len(symbols)] for x in products[at]), Fraction(value)]
        for (at, times), value in values.items()
    ]
    terms = [symbol * each for symbol in symbols for each in basis]
    some = rows[:: max(len(rows) // (3 * len(terms)), 1)]
    entries = [[QQ(x.numerator, x.denominator) for x in row] for row in some]
    reduced, pivots = DomainMatrix(entries, (len(some), len(terms) + 1), QQ).rref()
    factors = dict(zip(pivots, (Fraction(str(x[-1])) for x in reduced.to_list()), strict=False))
    right = (sum(row[at] * x for at, x in factors.items()) == row[-1] for row in rows)
    if len(terms) in pivots or not all(right):
        return None
    return sum(terms[at] * sympy.Rational(factor) for at, factor in factors.items())
