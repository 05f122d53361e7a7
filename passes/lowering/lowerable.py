"""Refuse schedules that cannot be lowered over a plan."""

from __future__ import annotations

from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule


def check_lowering(schedule: Schedule, plan: Plan, replicas: int) -> None:
    """Check that a schedule can be lowered over a plan; the arguments are those of ``Lower``.

    Raises:
        InputError: it cannot.
    """
    if schedule.stages != len(plan.stages):
        raise InputError(
            f"schedule {schedule.name!r} is for {schedule.stages} stages and the plan has "
            f"{len(plan.stages)}; cut the model into {schedule.stages} stages or make "
            f"the schedule for {len(plan.stages)}"
        )
    copied = any(schedule.working)
    if (replicas > 1 or copied) and schedule.trains and "A" not in schedule.kinds:
        who = "copies of a stage" if copied else f"{replicas} replicas"
        raise InputError(
            f"schedule {schedule.name!r} has no A, and the gradients of {who} would never be "
            "summed; add them with add_reduce, or write A yourself"
        )
    if replicas > 1 and schedule.copies:
        raise InputError(
            f"schedule {schedule.name!r} has copies of stages, and {replicas} replicas of "
            "the pipeline; use a schedule without copies, or one replica"
        )
