"""The instructions of a schedule that sum gradients over the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from fxpipe.errors import InputError
from fxpipe.extensions.replicas.opcodes import (
    AllGather,
    GatherWeights,
    PartialBackward,
    ReduceScatter,
    TakePart,
)
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.passes.lowering.sums import Reading, Sums


class SumReplicas(Sums):
    """An A begins to sum a stage's gradients, and the device waits for the sum as late as possible.

    If the gradients go in buckets and an A comes right behind a backward, that runs bucket by
    bucket, and the sum of each bucket begins as soon as it is complete. With two buckets, ``B1 A``
    becomes::

          partial_backward B s1[1] v0 bucket 0
          backward  s1[1] v0 rest
          reduce_scatter s1

    With ``shards`` a replica waits for the sum of its own part only, and updates that part of the
    weights. The other parts are gathered as late as possible: before the first task that reads the
    version, or with a flush at the end of the step, because the caller may read the weights.
    """

    def __init__(self, schedule: Schedule, plan: Plan, shards: bool, reading: Reading) -> None:
        """Raises InputError if a user's task needs summed gradients, of which each replica has only
        a part."""
        if shards:
            _check_own_tasks(schedule)
        self._shards = shards and "U" in schedule.kinds
        buckets = [len(stage.buckets) for stage in plan.stages]
        self._parts = {
            (task.kind, task.stage, task.microbatch): buckets[task.stage] - 1
            for row in schedule.rows
            for task, then in pairwise(row)
            if task.kind in "BW" and task.stage is not None
            if (then.kind, then.stage, then.batch) == ("A", task.stage, task.batch)
            if buckets[task.stage] > 1
        }
        late = self._shards and schedule.overlaps
        self._first_reads = _first_reads(schedule, reading) if late else {}

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
        return (TakePart if self._shards else AllGather)(stage, batch)

    def reads(self, device: int, position: int) -> Iterator[ins.Instruction]:
        if (weights := self._first_reads.get((device, position))) is not None:
            yield weights

    def gathered(self, behind: Iterable[ins.Instruction]) -> Iterator[ins.Instruction]:
        """Yield what comes behind a barrier, with new weights gathered before they are first read,
        or at the end."""
        waiting: dict[int, ins.Instruction] = {}
        for x in behind:
            if isinstance(x, ins.Update) and self._shards:
                waiting[x.stage] = GatherWeights(x.stage)
            elif isinstance(x, ins.Run) and x.stage in waiting:
                yield waiting.pop(x.stage)
            yield x
        yield from waiting.values()


def _first_reads(schedule: Schedule, reading: Reading) -> Mapping[tuple[int, int], GatherWeights]:
    """(Device, position in its row) → what gathers the weights that are first read there."""
    first: dict[int, tuple[int, int, int]] = {}
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            reader = None if task.kind == "A" else reading(task, position)
            if isinstance(reader, ins.Compute | ins.Run):
                # the newer the version, the earlier a batch meets the task
                at = -reader.version, position, device
                first[reader.stage] = min(first.get(reader.stage, at), at)
    return {
        (device, position): GatherWeights(stage, -older - 1)
        for stage, (older, position, device) in first.items()
    }


def _check_own_tasks(schedule: Schedule) -> None:
    for device, row in enumerate(schedule.rows):
        summed: set[int | None] = set()
        for _, position in sorted((-task.batch, at) for at, task in enumerate(row)):
            task = row[position]
            kind = KINDS[task.kind]
            if task.kind == "A":
                summed.add(task.stage)
            elif task.stage in summed and "gradients" in (*kind.reads, *kind.writes):
                raise InputError(
                    f"task {task} of schedule {schedule.name!r}, device {device}, position "
                    f"{position}, needs the gradients that A has summed, and with sharded "
                    "optimizers each replica has a part of them; let it come before A, or leave "
                    "shard_optimizer out"
                )
