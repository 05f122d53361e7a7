"""Assumptions about the times of tasks: which are equal, and which are at most another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from sympy import Eq, Expr, Rational, Symbol, expand, solve
from sympy.core.relational import (
    GreaterThan,
    LessThan,
    Relational,
    StrictGreaterThan,
    StrictLessThan,
)

from fxpipe.errors import InputError
from fxpipe.formulas.envelope import Vector
from fxpipe.formulas.formulas import time


@dataclass(frozen=True)
class Basis:
    """The independent (basic) times that are left when equal times are replaced by one.

    Attributes:
        symbols: the basic times.
        columns: letter → how often each basic time is in that of the task, times ``scale``.
        walls: vectors whose dot product with the basic times is at least 0.
        scale: the factor that makes all of ``columns`` integers.
    """

    symbols: tuple[Symbol, ...]
    columns: Mapping[str, Vector]
    walls: tuple[Vector, ...]
    scale: int

    def form(self, counts: Iterable[Expr]) -> Expr:
        """A linear form in the basic times."""
        total = sum(c * symbol for c, symbol in zip(counts, self.symbols, strict=True))
        return expand(total) / self.scale


def basis(letters: Sequence[str], given: Sequence[Relational]) -> Basis:
    """Replace equal times by one, and keep the other relations as bounds.

    Args:
        letters: the letters of the tasks.
        given: such as ``Eq(time("I"), time("F"))`` or ``time("W") <= time("F")``; both sides are
            sums of times, each with a factor.

    Raises:
        InputError: a relation is not of this kind.
    """
    known = {time(letter) for letter in letters}
    equal: dict[Symbol, Expr] = {}
    bounds: list[Expr] = []
    for relation in given:
        difference = _difference(relation).subs(equal)
        unknown = difference.free_symbols - known
        if unknown:
            # a relation of tasks that this schedule does not have says nothing about it
            continue
        if isinstance(relation, Eq):
            letter, value = _solved(difference)
            equal = {symbol: e.subs(letter, value) for symbol, e in equal.items()}
            equal[letter] = value
        else:
            bounds.append(difference)
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
    walls = [tuple(int(i == j) for j in range(len(symbols))) for i in range(len(symbols))]
    for bound in bounds:
        row = _coefficients(bound.subs(equal), symbols)
        common = lcm(*(c.q for c in row))
        walls.append(tuple(int(c * common) for c in row))
    return Basis(symbols, columns, tuple(walls), scale)


def _solved(difference: Expr) -> tuple[Symbol, Expr]:
    """One of the times as a sum of the others, if possible without negative terms."""
    solutions = [
        (symbol, value)
        for symbol in sorted(difference.free_symbols, key=str, reverse=True)
        for value in solve(difference, symbol)
    ]
    if not solutions:
        raise InputError(f"given says that {difference} is 0; relate times, each with a factor")
    return min(
        solutions, key=lambda found: any(found[1].coeff(x) < 0 for x in found[1].free_symbols)
    )


def _difference(relation: Relational) -> Expr:
    """The expression that is 0, or at least 0, where a relation holds."""
    if isinstance(relation, Eq | GreaterThan | StrictGreaterThan):
        return expand(relation.lhs - relation.rhs)
    if isinstance(relation, LessThan | StrictLessThan):
        return expand(relation.rhs - relation.lhs)
    raise InputError(
        f'given has {relation!r}; give relations of times, such as time("W") <= time("F") or '
        'Eq(time("I"), time("F"))'
    )


def _coefficients(expression: Expr, symbols: Sequence[Symbol]) -> list[Rational]:
    found = [expression.coeff(symbol) for symbol in symbols]
    rest = expand(expression - sum(c * x for c, x in zip(found, symbols, strict=True)))
    if rest != 0 or not all(c.is_Rational for c in found):
        raise InputError(
            f"given has {expression}, which is no sum of times each with a factor; write it so"
        )
    return found
