"""Let a step end with a flush, whatever its schedule lets overlap."""

from __future__ import annotations

import operator
from dataclasses import replace

from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule


def write_schedule(recipe: Recipe, devices: int, microbatches: int, short: bool) -> Schedule:
    """A recipe's schedule. Where it is too short to overlap with its delay it ends with a flush.

    Args:
        recipe: what writes it.
        devices: how many.
        microbatches: how many.
        short: whether that is fewer than a whole batch has.

    Raises:
        VerificationError: it is wrong.
    """
    schedule = recipe(devices, microbatches)
    if short and schedule.overlaps:
        needed = schedule.versions().smallest
        if any(map(operator.lt, schedule.delays, needed)):
            schedule = end_with_flush(schedule)
    return schedule.verify()


def end_with_flush(schedule: Schedule) -> Schedule:
    """The same tasks in the order in which one batch alone meets them, its flush included.

    Before, with a delay of 1, which two micro-batches on four devices are too few for::

        0: F0 B1'' U'' F1 B0'

    after, where any delay is enough::

        0: F0 F1 B0 B1 U
    """
    rows = tuple(
        tuple(replace(task, batch=0) for task in sorted(row, key=lambda task: -task.batch))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)
