"""What a compiled plan knows for a simulation: the times that were measured."""

from __future__ import annotations

from fxpipe.ir.plan import Plan
from fxpipe.ir.task import KINDS


def measured_costs(plan: Plan) -> dict[tuple[str, int], float]:
    """Letter and stage → seconds of one micro-batch of the example.

    What was not measured takes its kind's own cost, in which the stage's forward takes 1. Empty
    where nothing was measured.
    """
    costs: dict[tuple[str, int], float] = {}
    for stage in plan.stages:
        if stage.costs is None:
            return {}
        known = {
            "F": stage.costs.forward,
            "R": stage.costs.forward,
            "B": stage.costs.backward,
            "I": stage.costs.input_grad,
            "W": stage.costs.weight_grad,
        }
        for letter, kind in KINDS.items():
            seconds = known.get(letter)
            own = kind.cost * stage.costs.forward
            costs[letter, stage.index] = own if seconds is None else seconds
    return costs
