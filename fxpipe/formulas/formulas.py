"""Closed forms of a schedule, and the letters that they are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sympy import Expr, Symbol, true
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from fxpipe.errors import FormulaError

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
    """The time of a task, such as ``T_F`` of a forward."""
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
        samples: the number of points at which it equals the simulation for all times of tasks.
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
        found: quantity → its closed form, where there is one.
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
        lines = [
            f"{self.name}" + (f", given {', '.join(map(str, self.given))}" if self.given else "")
        ]
        for quantity in QUANTITIES:
            if quantity in self.found:
                formula = self.found[quantity]
                where = "" if formula.where is true else f"   for {formula.where}"
                lines.append(f"  {quantity:<11} = {formula.expression}{where}")
            else:
                lines.append(f"  {quantity:<11}   no closed form found")
        return "\n".join(lines)
