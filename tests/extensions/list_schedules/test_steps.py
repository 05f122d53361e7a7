"""Steps of schedules that rules make."""

from __future__ import annotations

import pytest

from fxpipe.ir.recipe import Recipe
from fxpipe.schedules import hanayo, interleaved_zb
from tests.runtime.test_orders import MICROBATCHES, steps

pytestmark = pytest.mark.models


@pytest.mark.parametrize("recipe", [hanayo, interleaved_zb], ids=lambda recipe: recipe.name)
def test_schedules_by_rules_add_gradients_in_ascending_order(recipe: Recipe) -> None:
    schedule = recipe(2, MICROBATCHES)
    steps(schedule, [range(MICROBATCHES)] * schedule.stages, range(MICROBATCHES))
