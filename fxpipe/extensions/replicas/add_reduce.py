"""Schedule → Schedule: a stage sums its gradients over replicas and copies, beside what follows.

before:  0: F0 F1 I0 W0 I1 W1 U            1: F0 I0 F1 I1 W0 W1 U
after:   0: F0 F1 I0 W0 I1 W1 A U          1: F0 I0 F1 I1 W0 W1 A U
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, Task


def add_reduce(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a reduce right after each stage's last backward.

    Where batches overlap, an update right behind the reduce would wait for the whole sum. So the
    update moves as late as the delay allows, right before the first forward that reads its version.
    The sum hides behind the tasks between: in 1F1B without flush, m − p + 1 of m micro-batches.
    Meanwhile the stage keeps the gradients of two batches. In schedules with user tasks or clips,
    updates stay where they are.

    Before, with a delay of 1 on two devices::

        0: F0 B1' U' F1 B0
        1: F0 B0 F1 B1 U

    after::

        0: U'' F0 B1' A' F1 B0
        1: U'' F0 B0 F1 B1 A

    Args:
        schedule: a schedule without reduces; any other is returned unchanged.
    """
    if "A" in schedule.kinds:
        return schedule
    rows = tuple(tuple(_reducing(row)) for row in schedule.rows)
    if schedule.depth and "C" not in schedule.kinds and not schedule.kinds - BUILT_IN:
        rows = tuple(_late(schedule, row) for row in rows)
    return replace(schedule, rows=rows)


def _reducing(row: tuple[Task, ...]) -> Iterator[Task]:
    """Yield a device's tasks with a reduce behind the last backward of each stage, or before its
    update if all backwards are on copies of the stage."""
    in_turn = sorted(row, key=lambda task: -task.batch)  # as a batch meets them
    last = {task.stage: task for task in in_turn if task.kind in "BW"}
    for task in row:
        if task.kind == "U" and task.stage not in last:
            yield replace(task, kind="A")
        yield task
        if last.get(task.stage) == task:
            yield replace(task, kind="A", microbatch=None)


def _late(schedule: Schedule, row: tuple[Task, ...]) -> tuple[Task, ...]:
    """Move each update of a device right before the first forward that reads its version, unless
    that leaves fewer tasks between it and its reduce."""
    tasks = row
    for update in [task for task in row if task.kind == "U"]:
        stage = update.stage
        assert stage is not None
        rest = [task for task in tasks if task != update]
        steps, at = min(
            (schedule.delay_of(stage, task.microbatch) - task.batch, at)
            for at, task in enumerate(rest)
            if (task.kind, task.stage) == ("F", stage)
        )
        moved = (*rest[:at], replace(update, batch=-1 - steps), *rest[at:])
        if _between(moved, stage) > _between(tasks, stage):
            tasks = moved
    return tasks


def _between(tasks: Sequence[Task], stage: int) -> int:
    """The number of tasks that a device runs between the reduce and the update of a stage."""
    at = {task.kind: (-task.batch, k) for k, task in enumerate(tasks) if task.stage == stage}
    (step, reduce), (later, update) = at["A"], at["U"]
    return (later - step) * len(tasks) + update - reduce - 1
