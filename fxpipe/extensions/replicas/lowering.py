"""The task A of a schedule, and its instructions, which sum gradients over the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fxpipe.extensions.replicas.opcodes import (
    AllGather,
    GatherWeights,
    PartialBackward,
    ReduceScatter,
    rest_of,
)
from fxpipe.extensions.sums import Needed
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, Task


class SumReplicas(Needed):
    """An A begins to sum a stage's gradients, and the device waits for the sum as late as possible.

    If the gradients go in buckets and an A comes right behind a backward, that runs bucket by
    bucket, and the sum of each bucket begins as soon as it is complete. With two buckets, ``B1 A``
    becomes::

          partial_backward B s1[1] v0 bucket 0
          rest_backward  s1[1] v0
          reduce_scatter s1
    """

    def __init__(self, schedule: Schedule, plan: Plan, updates: bool) -> None:
        super().__init__(schedule, updates)
        buckets = [len(stage.buckets) for stage in plan.stages]
        self._parts = {
            (task.kind, task.stage, task.microbatch): buckets[task.stage] - 1
            for row in schedule.rows
            for task, then in pairwise(each for each in row if each.kind != "D")
            if task.kind in "BW" and task.stage is not None
            if (then.kind, then.stage, then.batch) == ("A", task.stage, task.batch)
            if buckets[task.stage] > 1
        }

    def of(self, task: Task, device: int) -> ins.Instruction | None:
        assert task.stage is not None
        return ReduceScatter(task.stage, task.batch)

    def parts(self, task: Task, version: int) -> Iterator[ins.Instruction]:
        stage, i = task.stage, task.microbatch
        assert stage is not None
        for bucket in range(self._parts.get((task.kind, stage, i), 0)):
            assert i is not None
            yield PartialBackward(stage, i, version, task.batch, task.kind, bucket)

    def rest(self, task: Task, whole: ins.Compute) -> ins.Compute:
        if (task.kind, task.stage, task.microbatch) not in self._parts:
            return whole
        return rest_of(task.kind)(whole.stage, whole.microbatch, whole.version, whole.batch)

    def waits(self, stage: int, batch: int) -> ins.Instruction | None:
        return AllGather(stage, batch)


def gather_weights(program: Program) -> Program:
    """Program → Program: let the replicas exchange the new weights behind each update, of which
    each makes some.

    before:  update          s0 v0 -> v1
    after:   update          s0 v0 -> v1
             gather_weights  s0
    """
    lists = [[y for x in row for y in _exchanged(x)] for row in program.lists]
    return replace(program, lists=tuple(map(tuple, lists)))


def _exchanged(x: ins.Instruction) -> Iterator[ins.Instruction]:
    yield x
    if isinstance(x, ins.Update):
        yield GatherWeights(x.stage, x.batch)


def add_reduce(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a reduce right after each stage's last backward::

        before:  0: F0 F1 I0 W0 I1 W1 U            1: F0 I0 F1 I1 W0 W1 U
        after:   0: F0 F1 I0 W0 I1 W1 A U          1: F0 I0 F1 I1 W0 W1 A U

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
    # on one device no task shows that batches overlap; on several, a delay whose tasks do not reach
    # back is of a batch too short to overlap
    overlap = schedule.depth or (schedule.devices == 1 and any(schedule.delays))
    if overlap and "C" not in schedule.kinds and not schedule.kinds - BUILT_IN:
        rows = tuple(_late(schedule, row) for row in rows)
    return replace(schedule, rows=rows)


def _reducing(row: tuple[Task, ...]) -> Iterator[Task]:
    """Yield a device's tasks with a reduce behind the last backward of each stage, or before its
    update if all backwards are on copies of the stage."""
    in_turn = sorted(row, key=lambda task: -task.batch)  # as a batch meets them
    last = {task.stage: task for task in in_turn if task.kind in "BIW"}
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
            (schedule.delays[stage] - task.batch, at)
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
