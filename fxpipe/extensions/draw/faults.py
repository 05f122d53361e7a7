"""The picture of what a verifier refused."""

from __future__ import annotations

from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.draw.picture import Picture
from fxpipe.extensions.draw.plan import draw_plan
from fxpipe.extensions.draw.program import draw_program
from fxpipe.extensions.draw.schedule import draw_schedule
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule


def draw_faults(error: VerificationError) -> Picture:
    """Draw the plan, schedule or program that a verifier refused, with all its faults in red.

    Raises:
        InputError: the error holds no plan, schedule or program.
    """
    match error.value:
        case Schedule() as schedule:
            return draw_schedule(schedule, faults=error.faults)
        case Program() as program:
            return draw_program(program, faults=error.faults)
        case Plan() as plan:
            return draw_plan(plan, faults=error.faults)
    raise InputError("there is no plan, schedule or program in the error to draw")
