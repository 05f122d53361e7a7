"""Fit a polynomial, or a combination of a few polynomials, to exact samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod

from sympy import ZZ, Eq, Expr, Integer, Max, Min, Mod, Piecewise, Rational, Symbol, floor
from sympy.polys.matrices import DomainMatrix

Point = tuple[int, ...]
Samples = Mapping[Point, int]

_PERIODS = (1, 2, 3)
_SPARE = 3
"""How many samples there must be beyond those that determine the coefficients, as a check."""

_VALUES = 3
"""How many values each variable must take if it varies: two determine a linear function, and the
third checks it."""


@dataclass(frozen=True)
class Polynomial:
    """A polynomial of degree at most 1 in each variable.

    Attributes:
        terms: the exponents of a product, 0 or 1 for each variable → its coefficient, not 0.
    """

    terms: Mapping[Point, Fraction]

    def at(self, point: Point) -> Fraction:
        return sum(
            (
                c * prod(x for x, e in zip(point, exponents, strict=True) if e)
                for exponents, c in self.terms.items()
            ),
            Fraction(0),
        )

    def expression(self, symbols: Sequence[Symbol]) -> Expr:
        total: Expr = Integer(0)
        for exponents, c in self.terms.items():
            factors = [symbol for symbol, e in zip(symbols, exponents, strict=True) if e]
            total += Rational(c.numerator, c.denominator) * prod(factors, start=Integer(1))
        return total


@dataclass(frozen=True)
class Periodic:
    """A polynomial for each remainder of the first variable, divided by their number."""

    parts: tuple[Polynomial, ...]

    def at(self, point: Point) -> Fraction:
        return self.parts[point[0] % len(self.parts)].at(point)

    def expression(self, symbols: Sequence[Symbol]) -> Expr:
        first, period = symbols[0], len(self.parts)
        if period == 1:
            return self.parts[0].expression(symbols)
        constant = (0,) * len(symbols)
        alone = (1, *constant[1:])
        moving = [{e: c for e, c in part.terms.items() if any(e)} for part in self.parts]
        constants = [part.terms.get(constant, Fraction(0)) for part in self.parts]
        if all(terms == moving[0] for terms in moving):
            slope = moving[0].get(alone, Fraction(0))
            rest = Polynomial({e: c for e, c in moving[0].items() if e != alone})
            whole = _as_floor(first, slope, constants)
            if whole is None and period == 2:
                line = Polynomial({alone: slope, constant: constants[0]})
                step = constants[1] - constants[0]
                remainder = Rational(step.numerator, step.denominator) * Mod(first, 2)
                whole = line.expression(symbols) + remainder
            if whole is not None:
                return rest.expression(symbols) + whole
        return Piecewise(
            *(
                (part.expression(symbols), Eq(Mod(first, period), r))
                for r, part in enumerate(self.parts)
            )
        )


@dataclass(frozen=True)
class Extreme:
    """The minimum or the maximum of two polynomials."""

    of: tuple[Polynomial, Polynomial]
    least: bool

    def at(self, point: Point) -> Fraction:
        return (min if self.least else max)(part.at(point) for part in self.of)

    def expression(self, symbols: Sequence[Symbol]) -> Expr:
        return (Min if self.least else Max)(*(part.expression(symbols) for part in self.of))


Fitted = Periodic | Extreme
"""A function that meets all samples."""


def fit(samples: Samples) -> Fitted | None:
    """The simplest of these families that meets all samples exactly, or None."""
    return _fitted(tuple(samples.items()))


@lru_cache(maxsize=256)
def _fitted(pairs: tuple[tuple[Point, int], ...]) -> Fitted | None:
    """``fit``, cached, as many forms and quantities have the same coefficients."""
    samples = dict(pairs)
    for period in _PERIODS:
        parts = [
            polynomial({x: y for x, y in samples.items() if x[0] % period == r})
            for r in range(period)
        ]
        known = tuple(part for part in parts if part is not None)
        if len(known) == period:
            return Periodic(known)
    return _extreme(samples)


def polynomial(samples: Samples) -> Polynomial | None:
    """The polynomial that meets all samples; None if there is none, or too few samples.

    A variable that depends on another one in all samples, such as m = p, is left out.
    """
    size = len(next(iter(samples), ()))
    values = [len({x[k] for x in samples}) for k in range(size)]
    if any(1 < count < _VALUES for count in values):
        return None
    varied = [count > 1 for count in values]
    exponents = [
        e
        for e in product((0, 1), repeat=size)
        if sum(e) <= 3 and all(v or not k for v, k in zip(varied, e, strict=True))
    ]
    if len(samples) < len(exponents) + _SPARE:
        return None
    solution = _solve(
        [
            [*(prod(c for c, k in zip(x, e, strict=True) if k) for e in exponents), y]
            for x, y in samples.items()
        ]
    )
    if solution is None:
        return None
    return Polynomial({e: c for e, c in zip(exponents, solution, strict=True) if c})


def _extreme(samples: Samples) -> Extreme | None:
    """The minimum or maximum of a polynomial that meets the samples with a large second variable
    and one that meets the samples that the first does not."""
    one = polynomial({x: y for x, y in samples.items() if x[1] >= 2 * x[0]})
    if one is None:
        return None
    other = polynomial({x: y for x, y in samples.items() if one.at(x) != y})
    if other is None:
        return None
    for least in (True, False):
        extreme = Extreme((one, other), least)
        if all(extreme.at(x) == y for x, y in samples.items()):
            return extreme
    return None


def _solve(rows: list[list[int]]) -> list[Fraction] | None:
    """A solution of linear equations, each with its right side last; None if there is none.

    Unknowns that the equations do not determine are 0.
    """
    unknowns = len(rows[0]) - 1
    matrix = DomainMatrix(rows, (len(rows), unknowns + 1), ZZ)
    reduced, divisor, solved = matrix.rref_den()
    if unknowns in solved:
        return None
    solution = [Fraction(0)] * unknowns
    for column, row in zip(solved, reduced.to_list(), strict=False):
        solution[column] = Fraction(int(row[-1]), int(divisor))
    return solution


def _as_floor(first: Symbol, slope: Fraction, constants: Sequence[Fraction]) -> Expr | None:
    """``n ⌊(a p + c) / q⌋``, if it is the line with this slope and these constants by remainder."""
    period = len(constants)
    for n in (1, 2, 3):
        a = slope * period / n
        if a.denominator != 1 or a % period == 0:
            continue
        for c in range(-3 * period, 3 * period + 1):
            if all(
                n * ((int(a) * r + c) // period) == slope * r + constant
                for r, constant in enumerate(constants)
            ):
                return n * floor((int(a) * first + c) / Integer(period))
    return None
