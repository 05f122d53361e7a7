"""Let a schedule recompute: keep a stage's inputs, and run its forward again before its backward.

before:  1: F0 F1 B0 F2 B1 B2 U
after:   1: F0 F1 R0 B0 F2 R1 B1 B2 U          except_last: the last micro-batch is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

Recompute = Literal["never", "always", "except_last"]
RecomputeLike = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""The mode of all stages, of each in order, or by its number; who is left out never recomputes."""


def add_recompute(schedule: Schedule, recompute: RecomputeLike) -> Schedule:
    """Schedule → Schedule: a recompute right before each backward that is to have one.

    Args:
        schedule: one without recomputes of its own; those that it has are left alone.
        recompute: which stages run their forwards again. With "except_last" that of the last
            micro-batch does not: on the last stage its backward follows at once.
    """
    if "R" in schedule.kinds or not schedule.trains:
        return schedule
    modes = _modes(recompute, schedule.stages)
    rows = (tuple(_row(row, schedule.microbatches, modes)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def _modes(given: RecomputeLike, stages: int) -> list[Recompute]:
    """Stage → whether it recomputes."""
    if isinstance(given, str):
        return [given] * stages
    if isinstance(given, Mapping):
        return [given.get(stage, "never") for stage in range(stages)]
    return list(given)


def _row(row: tuple[Task, ...], microbatches: int, modes: Sequence[Recompute]) -> Iterator[Task]:
    for task in row:
        if task.kind in "BI" and task.stage is not None:
            mode = modes[task.stage]
            kept = mode == "except_last" and task.microbatch == microbatches - 1
            if mode != "never" and not kept:
                yield replace(task, kind="R")
        yield task
