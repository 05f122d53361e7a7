"""Schedule → Schedule: each stage waits for the gradient norms of all stages before it updates.

before:  0: F0 B2' F1 B3' U' F2 B0 F3 B1         2: F0 B0 F1 B1 F2 B2 F3 B3 U
after:   0: F0 B2' F1 B3' F2 B0 F3 B1 C' U'      2: F0 B0 F1 B1 F2 B2 F3 B3 C' U'
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task


def add_clip(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a clip before every update.

    With a flush, a device clips and updates once it has all of its gradients. Where batches
    overlap, a stage that finishes early would wait for the others. So all stages clip and update
    at the end of the step in which the last of them has its gradients. Meanwhile early stages keep
    the gradients of two batches.
    """
    if "C" in schedule.kinds or "U" not in schedule.kinds:
        return schedule
    if not schedule.overlaps:
        return replace(schedule, rows=tuple(map(_clipped, schedule.rows)))
    batch = min(task.batch for row in schedule.rows for task in row if task.kind != "U")
    late: list[tuple[Task, ...]] = []
    for device, row in enumerate(schedule.rows):
        tasks = [task for task in row if task.kind != "U"]
        for stage in schedule.held_by(device):
            tasks += [Task("C", None, stage, batch), Task("U", None, stage, batch)]
        late.append(tuple(tasks))
    return replace(schedule, rows=tuple(late))


def _clipped(row: tuple[Task, ...]) -> tuple[Task, ...]:
    """A device's tasks, where all clips and updates come behind its last backward or reduce."""
    complete = 1 + max((at for at, task in enumerate(row) if task.kind in "BWA"), default=-1)
    before = [task for task in row[:complete] if task.kind != "U"]
    early = [task for task in row[:complete] if task.kind == "U"]
    clips = [replace(task, kind="C") for task in row if task.kind == "U"]
    return (*before, *clips, *early, *row[complete:])
