"""What a verifier refused, as a picture."""

from __future__ import annotations

from fxpipe.draw.picture import Picture
from fxpipe.draw.plan import draw_plan
from fxpipe.draw.program import draw_program
from fxpipe.draw.schedule import draw_schedule
from fxpipe.errors import InputError, VerificationError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule


def draw_faults(error: VerificationError) -> Picture:
    """Draw what was refused, with all the faults of the error in red.

    Raises:
        InputError: the error does not hold what was refused.
    """
    match error.value:
        case Schedule() as schedule:
            return draw_schedule(schedule, faults=error.faults)
        case Program() as program:
            return draw_program(program, faults=error.faults)
        case Plan() as plan:
            return draw_plan(plan, faults=error.faults)
    raise InputError("there is no plan, schedule or program in the error to draw")
