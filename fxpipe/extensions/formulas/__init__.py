"""Closed forms of schedules with sympy: makespan, bubble and stash in p, m, v and task times."""

from __future__ import annotations

from fxpipe.extensions.formulas.derive import recipe_formulas, schedule_formulas
from fxpipe.extensions.formulas.formulas import Formula, Formulas, T, m, p, s, time, v

__all__ = [
    "Formula",
    "Formulas",
    "T",
    "m",
    "p",
    "recipe_formulas",
    "s",
    "schedule_formulas",
    "time",
    "v",
]
