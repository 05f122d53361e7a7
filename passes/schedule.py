"""Schedule → Schedule: write a recipe's schedule, and add the tasks that options ask for.

``add_recompute``: a stage keeps its inputs only, and runs its forward again before its backward.

before:  1: F0 F1 B0 F2 B1 B2 U
after:   1: F0 F1 R0 B0 F2 R1 B1 B2 U          except_last: not for the last micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.parts import Parts


def write_schedule(recipe: Recipe, devices: int, microbatches: int, short: bool) -> Schedule:
    """Write a recipe's schedule; end it with a flush if it is too short for its delay.

    Args:
        short: whether it has fewer micro-batches than a whole batch, perhaps too few to overlap.

    Raises:
        VerificationError: the schedule is wrong.
    """
    schedule = recipe(devices, microbatches)
    if short and schedule.overlaps and not schedule.versions().enough:
        schedule = Parts.end_with_flush.find()(schedule)
    return schedule.verify()


Recompute = Literal["never", "always", "except_last"]
RecomputeLike = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""One mode for all stages, a mode for each, or stage → mode; stages left out never recompute."""


def add_recompute(schedule: Schedule, recompute: RecomputeLike) -> Schedule:
    """Schedule → Schedule: a recompute right before each backward of stages that recompute, or
    before its pair.

    Args:
        schedule: a schedule without recomputes; any other is returned unchanged.
        recompute: which stages run their forwards again. "except_last" leaves out the last
            micro-batch: on the last stage its backward follows the forward at once.
    """
    if "R" in schedule.kinds or not schedule.trains:
        return schedule
    modes = modes_of(recompute, schedule.stages)
    rows = (tuple(_row(schedule, device, modes)) for device in range(schedule.devices))
    return replace(schedule, rows=tuple(rows))


def modes_of(recompute: RecomputeLike, stages: int) -> tuple[Recompute, ...]:
    """Stage → its mode."""
    if isinstance(recompute, str):
        return (recompute,) * stages
    if isinstance(recompute, Mapping):
        return tuple(recompute.get(stage, "never") for stage in range(stages))
    return tuple(recompute)


def _row(schedule: Schedule, device: int, modes: Sequence[Recompute]) -> Iterator[Task]:
    for unit in schedule.units(device):
        for task in unit:
            if task.kind in "BI" and task.stage is not None:
                mode = modes[task.stage]
                is_last = task.microbatch == schedule.microbatches - 1
                if mode == "always" or (mode == "except_last" and not is_last):
                    yield replace(task, kind="R")
        yield from unit
