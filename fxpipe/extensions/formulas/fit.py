"""Fit a polynomial, or a combination of a few polynomials, to exact samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import prod

from sympy import ZZ, Eq, Expr, Integer, Max, Min, Mod, Piecewise, Rational, Symbol, floor
from sympy.polys.matrices import DomainMatrix

Point = tuple[int, ...]
Samples = Mapping[Point, int]

Polynomial = Mapping[Point, Fraction]
"""The exponents of a product, 0 or 1 for each variable → its coefficient, not 0."""

_PERIODS = (1, 2, 3)
_SPARE = 3
"""How many samples there must be beyond those that determine the coefficients, as a check."""

_VALUES = 3
"""How many values each variable must take if it varies: two determine a linear function, and the
third checks it."""


def fit(samples: Samples, symbols: Sequence[Symbol]) -> Expr | None:
    """The simplest that meets all samples exactly, or None: a polynomial, one for each remainder of
    the first variable by 2 or 3, or the minimum or maximum of two."""
    for period in _PERIODS:
        parts = [
            polynomial({x: y for x, y in samples.items() if x[0] % period == r})
            for r in range(period)
        ]
        known = [part for part in parts if part is not None]
        if len(known) == period:
            return _by_remainder(known, symbols)
    return _extreme(samples, symbols)


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
    rows = [[*(_product(x, e) for e in exponents), y] for x, y in samples.items()]
    reduced, divisor, solved = DomainMatrix(rows, (len(rows), len(rows[0])), ZZ).rref_den()
    if len(exponents) in solved:
        return None
    # unknowns that the samples do not determine are 0
    solution = zip(solved, reduced.to_list(), strict=False)
    found = {exponents[k]: Fraction(int(row[-1]), int(divisor)) for k, row in solution}
    return {e: c for e, c in found.items() if c}


def _product(x: Point, exponents: Point) -> int:
    return prod(c for c, k in zip(x, exponents, strict=True) if k)


def _at(terms: Polynomial, point: Point) -> Fraction:
    return sum((c * _product(point, e) for e, c in terms.items()), Fraction(0))


def _written(terms: Polynomial, symbols: Sequence[Symbol]) -> Expr:
    total: Expr = Integer(0)
    for exponents, c in terms.items():
        factors = [symbol for symbol, e in zip(symbols, exponents, strict=True) if e]
        total += Rational(c.numerator, c.denominator) * prod(factors, start=Integer(1))
    return total


def _by_remainder(parts: Sequence[Polynomial], symbols: Sequence[Symbol]) -> Expr:
    """A polynomial for each remainder of the first variable, divided by their number."""
    first, period = symbols[0], len(parts)
    if period == 1:
        return _written(parts[0], symbols)
    constant = (0,) * len(symbols)
    alone = (1, *constant[1:])
    rests = [{e: c for e, c in part.items() if e not in (constant, alone)} for part in parts]
    slopes = {part.get(alone, Fraction(0)) for part in parts}
    if len(slopes) == 1 and all(rest == rests[0] for rest in rests):
        constants = [part.get(constant, Fraction(0)) for part in parts]
        whole = _as_floor(first, slopes.pop(), constants)
        if whole is not None:
            return _written(rests[0], symbols) + whole
    cases = ((_written(part, symbols), Eq(Mod(first, period), r)) for r, part in enumerate(parts))
    return Piecewise(*cases)


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


def _extreme(samples: Samples, symbols: Sequence[Symbol]) -> Expr | None:
    """The minimum or maximum of a polynomial that meets the samples with a large second variable
    and one that meets the samples that the first does not."""
    one = polynomial({x: y for x, y in samples.items() if x[1] >= 2 * x[0]})
    if one is None:
        return None
    other = polynomial({x: y for x, y in samples.items() if _at(one, x) != y})
    if other is None:
        return None
    for least, written in ((min, Min), (max, Max)):
        if all(least(_at(one, x), _at(other, x)) == y for x, y in samples.items()):
            return written(_written(one, symbols), _written(other, symbols))
    return None
