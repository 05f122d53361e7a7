"""The library's schedules of steps that end with a flush."""

from __future__ import annotations

from fxpipe.ir.recipe import RECIPES

TRAINING = [
    name
    for name, recipe in RECIPES.items()
    if (made := recipe(2, 4)).trains and not made.overlaps and recipe.slices == 1
]
"""All of them."""

FLUSHING = [name for name in TRAINING if not RECIPES[name].copies(2)]
"""Those without copies of stages, which replicas can run."""
