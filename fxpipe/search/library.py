"""What the library's schedules take on a problem."""

from __future__ import annotations

from math import inf

import fxpipe.schedules as library
from fxpipe.errors import FxpipeError
from fxpipe.ir.recipe import Recipe
from fxpipe.search.problem import Order, Problem
from fxpipe.search.timing import fits, value_of

Library = dict[str, tuple[float, Order] | str]
"""Name → its time and its order, or why it has none."""


def library_orders(problem: Problem) -> Library:
    """Name → its time, as the problem counts it, and its order; or why it has none here.

    Backwards are taken apart, or put together, as the problem asks.
    """
    recipes: list[Recipe] = [getattr(library, name) for name in library.__all__]
    found: Library = {}
    for name, recipe in sorted({each.name: each for each in recipes}.items()):
        order = _order(problem, recipe)
        if isinstance(order, str):
            found[name] = order
        elif not fits(problem, order):
            found[name] = "keeps more than fits"
        elif (value := value_of(problem, order)) < inf:
            found[name] = value, order
        else:
            found[name] = "gets stuck"
    return found


def _order(problem: Problem, recipe: Recipe) -> Order | str:
    try:
        if recipe.place(problem.devices) != problem.placement or recipe.copies(problem.devices):
            return "has its stages elsewhere"
        schedule = recipe(problem.devices, problem.microbatches)
        if max(schedule.delays) > (problem.delay or not problem.flush):
            return "reads older weights"
        if schedule.depth and not problem.delay:
            return "mixes batches on a device"
        if not schedule.trains or "R" in schedule.kinds:
            return "does not train, or recomputes"
        order = problem.order_of(schedule)
        if order is not None and problem.delay:
            if max(problem.schedule_of(order).delays) > problem.delay:
                return "reads older weights"
    except FxpipeError:
        return "is not for so many devices and micro-batches"
    return order or "leaves tasks out, or has others"
