"""Refuse schedules that cannot be lowered over a plan."""

from __future__ import annotations

from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule


def check_lowering(schedule: Schedule, plan: Plan, *, pause: bool, replicas: int) -> None:
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
    if pause:
        _check_pause(schedule)


def _check_pause(schedule: Schedule) -> None:
    if not schedule.trains:
        raise InputError(
            f"schedule {schedule.name!r} has no backward to pause before; lower it without pause"
        )
    if schedule.overlaps:
        raise InputError(
            f"schedule {schedule.name!r} lets batches overlap and cannot be paused; use one with a "
            "flush, such as gpipe"
        )
    for device, row in enumerate(schedule.rows):
        kinds = [task.kind for task in row]
        first = next((at for at, kind in enumerate(kinds) if kind in "BI"), len(kinds))
        if "F" in kinds[first:]:
            position = kinds.index("F", first)
            raise InputError(
                f"schedule {schedule.name!r} cannot pause between forward and backward: device "
                f"{device} has {row[position]} at position {position}, after a backward; use one "
                "that runs all forwards first, such as gpipe"
            )
