"""The formulas of a schedule as text, for given times of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sympy import Eq, Rational
from sympy.core.relational import Relational

from fxpipe.errors import FxpipeError, VerificationError
from fxpipe.extensions.formulas.derive import recipe_formulas, schedule_formulas
from fxpipe.extensions.formulas.formulas import Formulas, time
from fxpipe.extensions.simulator.costs import PAIRS
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS


def formulas_text(
    schedule: Schedule, recipe: Recipe | None, costs: Mapping[Any, float] | None
) -> str:
    """Makespan, bubble and stash as formulas in the time of a forward, or why there are none.

    With a recipe, the numbers of devices and micro-batches are variables of the formulas. The
    formulas hold for the ratios between the times in ``costs``.
    """
    own = {key: cost for key, cost in (costs or {}).items() if isinstance(key, str)}
    if len(own) < len(costs or {}):
        return "formulas are for stages and micro-batches that take equal times"
    try:
        return str(_formulas(schedule, recipe, _ratios(schedule, own)))
    except FxpipeError as error:
        return f"no formulas: {' '.join(str(error).split())}"


def _formulas(schedule: Schedule, recipe: Recipe | None, given: tuple[Relational, ...]) -> Formulas:
    if recipe is None:
        return schedule_formulas(schedule, given=given)
    try:
        return recipe_formulas(recipe, given=given)
    except VerificationError:
        # The recipe needs at least as many micro-batches as devices.
        return recipe_formulas(
            recipe,
            given=given,
            microbatches=lambda p: (p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p),
        )


def _ratios(schedule: Schedule, costs: Mapping[str, float]) -> tuple[Relational, ...]:
    """The time of each kind of micro-batch task, and of pairs, as a multiple of a forward's."""
    times = {letter: kind.cost for letter, kind in KINDS.items() if kind.per_microbatch} | dict(
        costs
    )
    for pair in PAIRS:
        times.setdefault(pair, times["F"] + times[pair[-1]])
    forward = Rational(str(times["F"]))
    kinds = schedule.kinds | {f"F&{then.kind}" for then in schedule.paired}
    return tuple(
        Eq(time(letter), Rational(str(times[letter])) / forward * time("F"))
        for letter in times
        if letter in kinds - {"F"} and forward
    )
