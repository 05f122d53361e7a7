"""How many micro-batches stages hold at once, by their schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task


def stash_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Stage → the most micro-batches whose saved values it holds at once.

    It holds them from the forward, or the recompute if there is one, to the backward, except while
    they are offloaded.
    """
    again = {(t.stage, t.microbatch) for row in schedule.rows for t in row if t.kind == "R"}
    return _peaks(schedule, lambda t: t.kind == "R" or (t.stage, t.microbatch) not in again)


def arrival_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Stage → the most micro-batches between forward and backward at once, but not offloaded."""
    return _peaks(schedule, lambda task: task.kind in "FP")


def _peaks(schedule: Schedule, begins: Callable[[Task], bool]) -> tuple[int, ...]:
    """Stage → the most micro-batches at once that a task has begun, by ``begins``, and that have
    not had their backward."""
    peaks = [0] * schedule.stages
    for row in schedule.rows:
        held = [0] * schedule.stages
        last = "W" if any(task.kind == "W" for task in row) else "B"
        leaving: list[int] = []  # the stages whose offloads overlap the next task
        for step in range(schedule.depth + 1):
            for task in row:
                stage = task.stage
                if stage is None or step + task.batch < 0:
                    continue
                if task.kind == "O" and begins(replace(task, kind="P")):
                    leaving.append(stage)
                    continue
                if task.kind in "FRP" and begins(task):
                    held[stage] += 1
                elif task.kind in ("B", last):
                    held[stage] -= 1
                peaks[stage] = max(peaks[stage], held[stage])
                while leaving and task.kind != "P":
                    held[leaving.pop()] -= 1
    return tuple(peaks)
