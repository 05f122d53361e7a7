"""Closed forms of a schedule, their symbols, and the assumptions about the times of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import lcm

from sympy import Basic, Eq, Expr, Ne, Rational, Symbol, expand, mathml, true
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from fxpipe.errors import FormulaError, InputError

Vector = tuple[int, ...]

p = Symbol("p", integer=True, positive=True)
"""Devices."""

m = Symbol("m", integer=True, positive=True)
"""Micro-batches a step."""

v = Symbol("v", integer=True, positive=True)
"""Stages a device."""

s = Symbol("s", integer=True, nonnegative=True)
"""A stage, from 0."""

T = Symbol("T", integer=True, positive=True)
"""Steps in a row, where batches overlap."""


def time(letter: str) -> Symbol:
    """The time of a task, such as ``T_F`` of a forward, or of a pair, ``T_F&B``."""
    return Symbol(f"T_{letter}", nonnegative=True)


QUANTITIES = {
    "makespan": "until everything is done",
    "bubble": "share of the devices' time that is idle until the last micro-batch is through",
    "bubble_size": "the most that a device idles between its first task and its last",
    "stash": "micro-batches that stage s keeps at once, at most",
    "peak_stash": "micro-batches of a stage that a device keeps at once, at most",
}


@dataclass(frozen=True)
class Formula:
    """A closed form.

    Attributes:
        expression: in p, m, v, s, T and the times of tasks.
        where: the region of p and m in which it holds, as far as it was tried.
        samples: at how many points it equals the simulation for all times of tasks.
    """

    expression: Expr
    where: Boolean
    samples: int


@dataclass(frozen=True)
class Formulas:
    """Closed forms of a schedule's makespan, bubble and stash.

    All stages take the same time and transfers take none. ``makespan`` counts everything. In
    ``bubble`` and ``bubble_size`` tasks that come once per step, such as updates, take no time.

    Attributes:
        name: the schedule's name.
        given: the assumptions about the times of tasks.
        found: quantity → its closed form, if there is one.
    """

    name: str
    given: tuple[Relational, ...]
    found: Mapping[str, Formula]

    @property
    def makespan(self) -> Expr:
        """The time until everything is done."""
        return self["makespan"].expression

    @property
    def bubble(self) -> Expr:
        """The idle fraction of the devices' time until the last micro-batch is finished."""
        return self["bubble"].expression

    @property
    def bubble_size(self) -> Expr:
        """The most that a device idles between its first task and its last."""
        return self["bubble_size"].expression

    @property
    def stash(self) -> Expr:
        """The most micro-batches that stage s keeps at once."""
        return self["stash"].expression

    @property
    def peak_stash(self) -> Expr:
        """The most that a device's stages keep at once, in micro-batches of a stage."""
        return self["peak_stash"].expression

    def __getitem__(self, quantity: str) -> Formula:
        """A closed form with the region in which it holds.

        Raises:
            FormulaError: there is none.
        """
        if quantity not in self.found:
            raise FormulaError(
                f"no closed form found for the {quantity} of schedule {self.name!r} over the "
                "points that were tried; say more about the times of its tasks with given=, such "
                'as Eq(time("B"), 2 * time("F")), or try other devices and microbatches'
            )
        return self.found[quantity]

    def __str__(self) -> str:
        given = f", given {', '.join(map(str, self.given))}" if self.given else ""
        lines = [self.name + given]
        for quantity in QUANTITIES:
            if quantity in self.found:
                formula = self.found[quantity]
                where = "" if formula.where is true else f"   for {formula.where}"
                lines.append(f"  {quantity:<11} = {formula.expression}{where}")
            else:
                lines.append(f"  {quantity:<11}   no closed form found")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The formulas for notebooks, as MathML, which browsers show without a network."""
        rows = []
        for quantity in QUANTITIES:
            shown, where = "no closed form found", ""
            if quantity in self.found:
                formula = self.found[quantity]
                shown = _math(formula.expression)
                where = "" if formula.where is true else f"for {_math(formula.where)}"
            cells = (f'<td style="text-align: left">{t}</td>' for t in (quantity, shown, where))
            rows.append(f"<tr>{''.join(cells)}</tr>")
        given = "".join(f", given {_math(relation)}" for relation in self.given)
        return f"{escape(self.name)}{given}<table>{''.join(rows)}</table>"


def _math(expression: Basic) -> str:
    return f'<math displaystyle="true">{mathml(expression, printer="presentation")}</math>'


@dataclass(frozen=True)
class Basis:
    """The independent (basic) times that are left when equal times are replaced.

    Attributes:
        symbols: the basic times.
        columns: letter of a task → how often its time contains each basic time, times ``scale``.
        walls: vectors whose dot product with the basic times is at least 0.
        scale: the factor that makes all of ``columns`` integers.
    """

    symbols: tuple[Symbol, ...]
    columns: Mapping[str, Vector]
    walls: tuple[Vector, ...]
    scale: int

    def form(self, counts: Iterable[Expr | int]) -> Expr:
        """A linear form in the basic times."""
        total = sum(c * symbol for c, symbol in zip(counts, self.symbols, strict=True))
        return expand(total) / self.scale


def basis(letters: Sequence[str], given: Sequence[Relational]) -> Basis:
    """Replace times that are given as a sum of others, and keep the other relations as bounds.

    Args:
        letters: the letters of the tasks.
        given: such as ``Eq(time("B"), time("I") + time("W"))``, with a time on its left, or
            ``time("W") <= time("F")``; sums of times, each with a factor.

    Raises:
        InputError: a relation is not of this kind.
    """
    if isinstance(given, Basic):
        raise InputError(f"given is {given}; give a list of such relations")
    known = {time(letter) for letter in letters}
    equal: dict[Symbol, Expr] = {}
    bounds: list[Expr] = []
    for relation in given:
        if not isinstance(relation, Relational) or isinstance(relation, Ne):
            raise InputError(f"given has {relation!r}; {_SUCH}")
        if relation.free_symbols - known:  # about tasks that this schedule does not have
            continue
        if isinstance(relation, Eq):
            letter, value = relation.lhs, expand(relation.rhs.subs(equal))
            if letter not in known or letter in equal or value.has(letter):
                raise InputError(f"given has {relation}; {_SUCH}")
            equal = {symbol: expand(e.subs(letter, value)) for symbol, e in equal.items()}
            equal[letter] = value
        else:
            bounds.append(relation.gts - relation.lts)
    symbols = tuple(time(letter) for letter in letters if time(letter) not in equal)
    rows = {
        letter: _coefficients(equal.get(time(letter), time(letter)), symbols) for letter in letters
    }
    scale = lcm(*(c.q for row in rows.values() for c in row))
    columns = {letter: tuple(int(c * scale) for c in row) for letter, row in rows.items()}
    if any(c < 0 for column in columns.values() for c in column):
        raise InputError(
            "a time is given as a difference of others, which could be below 0; write it as a "
            'bound, such as time("W") <= time("F")'
        )
    walls = []
    for bound in bounds:
        row = _coefficients(expand(bound.subs(equal)), symbols)
        common = lcm(*(c.q for c in row))
        walls.append(tuple(int(c * common) for c in row))
    return Basis(symbols, columns, tuple(walls), scale)


_SUCH = (
    'give relations of times, such as time("W") <= time("F"), or Eq(time("B"), 2 * time("F")) with '
    "one time on its left"
)


def _coefficients(expression: Expr, symbols: Sequence[Symbol]) -> list[Rational]:
    coefficients = [expression.coeff(symbol) for symbol in symbols]
    rest = expand(expression - sum(c * x for c, x in zip(coefficients, symbols, strict=True)))
    if rest != 0 or not all(c.is_Rational for c in coefficients):
        raise InputError(
            f"given has {expression}, which is no sum of times each with a factor; write it so"
        )
    return coefficients
