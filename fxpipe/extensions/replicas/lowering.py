"""The instructions of a schedule that sum gradients over the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from fxpipe.extensions.replicas.opcodes import (
    AllGather,
    GatherWeights,
    PartialBackward,
    ReduceScatter,
)
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.passes.lowering.sums import Sums


class SumReplicas(Sums):
    """An A begins to sum a stage's gradients, and the device waits for the sum as late as possible.

    If the gradients go in buckets and an A comes right behind a backward, that runs bucket by
    bucket, and the sum of each bucket begins as soon as it is complete. With two buckets, ``B1 A``
    becomes::

          partial_backward B s1[1] v0 bucket 0
          backward  s1[1] v0 rest
          reduce_scatter s1
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        buckets = [len(stage.buckets) for stage in plan.stages]
        self._parts = {
            (task.kind, task.stage, task.microbatch): buckets[task.stage] - 1
            for row in schedule.rows
            for task, then in pairwise(row)
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

    def rest(self, task: Task) -> bool:
        return (task.kind, task.stage, task.microbatch) in self._parts

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
