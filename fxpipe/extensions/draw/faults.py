"""The picture of what a verifier refused."""

from __future__ import annotations

from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.draw.picture import Picture
from fxpipe.extensions.draw.plan import draw_plan
from fxpipe.extensions.draw.schedule import draw_schedule
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule


def draw_faults(error: VerificationError) -> Picture:
    """Draw the plan or schedule that a verifier refused, with all its faults in red.

    Raises:
        InputError: the error holds no plan or schedule.
    """
    match error.value:
        case Schedule() as schedule:
            return draw_schedule(schedule, faults=error.faults)
        case Plan() as plan:
            return draw_plan(plan, faults=error.faults)
    raise InputError(
        "there is no plan or schedule in the error to draw; faults of a program say where they are "
        "in its text"
    )
