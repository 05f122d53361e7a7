"""When the tasks of a schedule run, if each takes its time and communication takes none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from fxpipe.draw.walk import NOWHERE, Place, Walked, walk_rows
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS, Task
from fxpipe.ir.unroll import unroll_schedule
from fxpipe.simulator.costs import Costs, Times, times_of

_UNKNOWN_TIME = 1.0


class Timeline(Walked[Task]):
    """A schedule that has been walked."""

    @cached_property
    def makespan(self) -> float:
        """When the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last task ends, with those that never run."""
        return max((span.end for span in (*self.spans, *self.unrun)), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Share of the devices' time that is idle, until the last micro-batch is through.

        The updates that come after it do not count, as in the papers' (p − 1) / (m + p − 1).
        """
        through = max((s.end for s in self.spans if s.task.microbatch is not None), default=0.0)
        if through == 0:
            return 0.0
        busy = sum(max(min(s.end, through) - s.start, 0.0) for s in self.spans)
        return 1 - busy / (self.devices * through)


def walk(schedule: Schedule, costs: Costs | None = None, *, steps: int = 0) -> Timeline:
    """Run a schedule on paper, valid or not.

    A forward waits for the forward of the stage before, a backward for the backward of the stage
    after, every task for those of its own stage that it follows, and an update for all that comes
    before it on its stage, or where no batches overlap on every device. Within an earlier batch,
    what the schedule does not hold has run already.

    Args:
        schedule: what to run.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's.
        steps: how many steps to run, and the flush behind them, with batches counted from the
            first; 0 for one window in the midst of others.
    """
    times = times_of(schedule.stages, schedule.kinds, costs)
    flush = not (schedule.depth or any(schedule.delays))
    orders = [_run_order(row, flush) for row in schedule.rows]
    moved = replace(
        schedule,
        rows=tuple(
            tuple(row[position] for position in order)
            for row, order in zip(schedule.rows, orders, strict=True)
        ),
    )
    run = unroll_schedule(moved, steps) if steps else moved
    walked = walk_rows(run.rows, lambda task: _time(task, times), _needs(run, flush))
    if steps:
        return Timeline(walked.devices, walked.spans, walked.unrun)
    ran, unrun = (
        tuple(replace(span, position=orders[span.device][span.position]) for span in spans)
        for spans in (walked.spans, walked.unrun)
    )
    return Timeline(walked.devices, ran, unrun)


def _run_order(row: Sequence[Task], flush: bool) -> list[int]:
    """The positions of a row's tasks in the order in which they run.

    Where every step ends with a flush, updates, and tasks once a step behind one, come last: they
    wait for all devices.
    """
    late: list[int] = []
    for position, task in enumerate(row):
        if flush and (task.kind == "U" or (late and task.kind not in BUILT_IN)):
            late.append(position)
    behind = set(late)
    return [position for position in range(len(row)) if position not in behind] + late


def _time(task: Task, times: Times) -> float:
    """Its time; that of its kind alone where its stage does not exist."""
    key = task.kind, -1 if task.stage is None else task.stage
    if key in times:
        return times[key]
    return KINDS[task.kind].cost if task.kind in KINDS else _UNKNOWN_TIME


def _needs(schedule: Schedule, flush: bool) -> list[list[list[Place]]]:
    """Device → for each of its tasks, the places of the tasks that it waits for."""
    places: dict[Task, Place] = {}
    # Stage (None for any) and batch → device → the place of its last task before the updates.
    last: dict[tuple[int | None, int], dict[int, Place]] = {}
    updated: set[tuple[int, int]] = set()
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            places.setdefault(task, (device, position))
            if task.kind == "U":
                updated.add((device, task.batch))
            if (device, task.batch) not in updated:
                for stage in (task.stage, None):
                    last.setdefault((stage, task.batch), {})[device] = (device, position)

    def needs(task: Task) -> list[Place]:
        if task.kind == "U":
            stage = None if flush else task.stage
            return list(last.get((stage, task.batch), {}).values())
        kind = KINDS.get(task.kind)
        before = [
            Task(letter, task.microbatch, task.stage, task.batch)
            for letter in (kind.follows if kind else "")
        ]
        waits = [places[other] for other in before if other in places]
        beyond = _across(schedule, task)
        if beyond:
            found = [places[other] for other in beyond if other in places]
            absent = [] if task.batch < 0 else [NOWHERE]
            waits += found or absent
        return waits

    return [[needs(task) for task in row] for row in schedule.rows]


def _across(schedule: Schedule, task: Task) -> list[Task]:
    """The tasks of the neighbouring stages, one of which brings what a task reads."""
    kind = KINDS.get(task.kind)
    if kind is None or task.stage is None:
        return []
    return [
        Task(letter, task.microbatch, stage, task.batch)
        for letters, stage in ((kind.previous, task.stage - 1), (kind.next, task.stage + 1))
        if 0 <= stage < schedule.stages
        for letter in letters
    ]
