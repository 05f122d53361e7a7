"""Schedule → Schedule: write a recipe's schedule, and add the tasks that options ask for.

``add_recompute``: a stage keeps its inputs only, and runs its forward again before its backward.

before:  1: F0 F1 B0 F2 B1 B2 U
after:   1: F0 F1 R0 B0 F2 R1 B1 B2 U          except_last: not for the last micro-batch

``add_reduce``: a stage sums its gradients over replicas and copies, beside whatever follows.

before:  0: F0 F1 I0 W0 I1 W1 U            1: F0 I0 F1 I1 W0 W1 U
after:   0: F0 F1 I0 W0 I1 W1 A U          1: F0 I0 F1 I1 W0 W1 A U
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, Task


def write_schedule(recipe: Recipe, devices: int, microbatches: int, short: bool) -> Schedule:
    """Write a recipe's schedule; end it with a flush if it is too short for its delay.

    Args:
        short: whether it has fewer micro-batches than a whole batch, perhaps too few to overlap.

    Raises:
        VerificationError: the schedule is wrong.
    """
    schedule = recipe(devices, microbatches)
    if short and schedule.overlaps and not schedule.versions().enough:
        schedule = end_with_flush(schedule)
    return schedule.verify()


def end_with_flush(schedule: Schedule) -> Schedule:
    """Put all tasks of a batch into one step, in the order in which the batch meets them.

    Before, on four devices with a delay of 1, for which two micro-batches are too few::

        0: F0 B1'' U'' F1 B0'

    after::

        0: F0 F1 B0 B1 U

    The tasks of a pair come apart.
    """
    rows = tuple(
        tuple(replace(task, batch=0) for task in sorted(row, key=lambda task: -task.batch))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows, paired=frozenset())


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
