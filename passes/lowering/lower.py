"""Lower a schedule over a plan to a program of compute alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BESIDE, BUILT_IN, KINDS, Task
from fxpipe.ir.value import own_buffer
from fxpipe.passes.lowering.lowerable import check_lowering
from fxpipe.torchtools.state import without_collection


@dataclass(frozen=True)
class Lower:
    """Schedule × Plan → Program: each task becomes one compute instruction.

    Before, with ``updates``::

        1: F0 B0 F1 B1 U

    after::

        device 1
          forward   s1[0] v0 keep
          backward  s1[0] v0
          forward   s1[1] v0 keep
          backward  s1[1] v0
          barrier
          update    s1 v0 -> v1

    A failure must leave every weight as it was before the step, so all updates of a device stand
    behind one barrier at its end. With a flush the last device to finish decides how long the
    step takes, so it costs nothing. Where batches overlap there is no barrier, and every update
    stands where the schedule has it.

    All tasks of a micro-batch on a stage, in batch b (0 for this step's), read version b − its
    delay there; the update from batch b makes version b + 1, which a user's own task behind it
    reads. What is recomputed keeps its inputs instead of what its backward needs. Where stages
    clip, each tells the norm of its gradients to all as soon as they are complete.

    With several replicas an A begins to sum a stage's gradients. It waits for the sums as late as
    it can: before the first task that needs them, which of a clip is the first on the device, as
    all stages wait for all norms. Where there is none, and before updates with a flush, it is at
    the end. With one replica an A becomes nothing.

    Where the gradients go in buckets and an A stands right behind a backward, that runs bucket by
    bucket, and the sum of each begins as soon as it is complete. With two, ``B1 A`` becomes::

          partial_backward B s1[1] v0 bucket 0
          backward  s1[1] v0 rest
          reduce_scatter s1

    An O begins to store, a P begins to fetch, and the backward, or an R, is parted from both by
    what waits::

          offload   offloaded:1[0]
          prefetch  fetching:1[0]
          await     fetched:1[0]
          backward  s1[0] v0

    With ``shards`` a replica waits for the sum of its own part alone, and updates that part of the
    weights. The others' parts are gathered as late as they can be: before the first task that reads
    the version, or with a flush at the end of the step, whose caller may read the weights.
    A stage with copies shares its weights with them at the begin of the step. An A on a copy gives
    the stage's own device what the copy has summed, and that adds it as late as it can, likewise.
    Before, with ``place 0 | +0``::

        0: F0 B0 A U
        1: F1 B1 A

    after::

        device 0
          share     s0
          forward   s0[0] v0 keep
          backward  s0[0] v0
          add       s0
          barrier
          update    s0 v0 -> v1
        device 1
          forward   s0[1] v0 keep
          backward  s0[1] v0
          give      s0[1]
          barrier

    Attributes:
        plan: the stages and edges.
        updates: whether U tasks become updates; without an optimizer they become nothing.
        pause: whether each device pauses before its first backward, so that the caller can take
            the outputs and come back later with their gradients.
        replicas: how many pipelines run the program side by side.
        shards: whether each of them updates a part of the weights, and keeps optimizer state for
            that part alone.
    """

    plan: Plan
    updates: bool = True
    pause: bool = False
    replicas: int = 1
    shards: bool = False
    name: ClassVar[str] = "lower"

    @without_collection()
    def __call__(self, schedule: Schedule) -> Program:
        """Lower a verified schedule.

        Raises:
            InputError: the counts of stages differ, the schedule cannot be paused, it does not
                sum the gradients of several replicas or of copies, or a task needs what no replica
                has whole.
        """
        check_lowering(
            schedule,
            self.plan,
            pause=self.pause,
            replicas=self.replicas,
            shards=self.shards and self.updates,
        )
        edges = self.plan.edges
        buckets = [len(stage.buckets) for stage in self.plan.stages]
        one = _Instructions(schedule, self.updates, self.replicas, self.shards, buckets)
        flush = not schedule.overlaps
        return Program(
            name=schedule.name,
            microbatches=schedule.microbatches,
            placement=schedule.placement,
            copies=schedule.working,
            edges=edges if one.trains else tuple(replace(edge, gradient=False) for edge in edges),
            lists=tuple(
                tuple(self._device(one, device, row, flush))
                for device, row in enumerate(schedule.rows)
            ),
            passes=(self.name,),
            replicas=self.replicas,
        )

    def _device(
        self, one: _Instructions, device: int, row: tuple[Task, ...], flush: bool
    ) -> Iterator[ins.Instruction]:
        """A device's tasks; where batches overlap each update stands where it is written."""
        paused = not self.pause
        behind: list[ins.Instruction] = []
        for stage, copies in enumerate(one.copies):
            if copies and one.home[stage] == device:
                yield ins.Share(stage)
        for position, task in enumerate(row):
            if task.kind in "BI" and not paused:
                yield ins.Pause()
                paused = True
            if task.kind == "A" and device in one.copies_of(task):
                assert task.stage is not None
                yield ins.Give(task.stage, device)
                continue
            if (task.kind == "U" and not self.updates) or (task.kind == "A" and self.replicas == 1):
                continue
            yield from one.before(device, position)
            yield from one.parts(task)
            instruction = one.of(task, position)
            updates = isinstance(instruction, ins.Update)
            if flush and (updates or (behind and isinstance(instruction, ins.Run))):
                behind.append(instruction)
            else:
                yield instruction
                yield from one.after(task)
        if not paused:
            yield ins.Pause()  # a device without a backward: all of them are resumed together
        yield from one.before(device, len(row))
        if flush and one.trains and self.updates:
            yield ins.Barrier()
            yield from one.gathered(behind)


class _Instructions:
    """The instruction of each task of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        updates: bool,
        replicas: int,
        shards: bool,
        buckets: Sequence[int],
    ) -> None:
        self.trains = schedule.trains
        self._shards = shards and updates and replicas > 1 and "U" in schedule.kinds
        self._delay_of = schedule.delay_of
        self._clips = "C" in schedule.kinds
        self._sums = replicas > 1
        self.home, self.copies = schedule.placement, schedule.working
        summing = self._sums or any(self.copies)
        self._gathers = _gathers(schedule, updates) if summing and self.trains else {}
        self._last = schedule.microbatches - 1
        self._parts = {
            (task.kind, task.stage, task.microbatch): buckets[task.stage] - 1
            for row in schedule.rows
            for task, then in pairwise(row)
            if self._sums and task.kind in "BW" and task.stage is not None
            if (then.kind, then.stage, then.batch) == ("A", task.stage, task.batch)
            if buckets[task.stage] > 1
        }
        self._recomputed, self._fetched = schedule.pairs_of("R"), schedule.pairs_of("P")
        self._updates = {
            task.stage: (-task.batch, position)
            for row in schedule.rows
            for position, task in enumerate(row)
            if task.kind == "U" and updates
        }
        self._first_reads = self._readers(schedule) if self._shards and schedule.overlaps else {}

    def _readers(self, schedule: Schedule) -> Mapping[tuple[int, int], ins.GatherWeights]:
        """Device and position in its row → what gathers the weights that are first read there."""
        found: dict[int, tuple[tuple[int, int], int]] = {}
        for device, row in enumerate(schedule.rows):
            for position, task in enumerate(row):
                reader = self.of(task, position)
                if isinstance(reader, ins.Compute | ins.Run):
                    moment = -reader.version, position  # the newer the version, the earlier
                    first = found.get(reader.stage, (moment, device))
                    found[reader.stage] = min(first, (moment, device))
        return {
            (device, position): ins.GatherWeights(stage, -older - 1)
            for stage, ((older, position), device) in found.items()
        }

    def gathered(self, behind: Sequence[ins.Instruction]) -> Iterator[ins.Instruction]:
        """What stands behind a barrier, with the new weights gathered before they are read, or at
        the end."""
        waiting: dict[int, ins.Instruction] = {}
        for x in behind:
            if isinstance(x, ins.Update) and self._shards:
                waiting[x.stage] = ins.GatherWeights(x.stage)
            elif isinstance(x, ins.Run) and x.stage in waiting:
                yield waiting.pop(x.stage)
            yield x
        yield from waiting.values()

    def of(self, task: Task, position: int) -> ins.Instruction:
        """The instruction of a task at a position of its row."""
        kind, stage, i, batch = task.kind, task.stage, task.microbatch, task.batch
        assert stage is not None
        version = batch - self._delay_of(stage, i)
        if kind not in BUILT_IN:
            update = self._updates.get(stage)
            if update is not None and update < (-batch, position):
                version = batch + 1
            return ins.Run(kind, stage, i, version, batch)
        if kind == "A":
            return ins.ReduceScatter(stage, batch)
        if kind == "C":
            return ins.Clip(stage, batch)
        if i is None:
            return ins.Update(stage, batch, batch + 1, batch)
        if kind in BESIDE:
            made = own_buffer("offloaded" if kind == "O" else "fetching", stage, i, batch)
            return ins.Offload(made) if kind == "O" else ins.Prefetch(made)
        if kind == "F":
            again = (stage, i) in self._recomputed
            return ins.Forward(stage, i, version, batch, self.trains and not again, again)
        if kind == "B":
            return ins.Backward(stage, i, version, batch, (kind, stage, i) in self._parts)
        if kind == "W":
            return ins.WeightGrad(stage, i, version, batch, (kind, stage, i) in self._parts)
        return (ins.Recompute if kind == "R" else ins.InputGrad)(stage, i, version, batch)

    def parts(self, task: Task) -> Iterator[ins.Instruction]:
        """What waits until a backward or a recompute has what it needs, and what runs a backward
        before a reduce up to its last bucket of gradients."""
        stage, i = task.stage, task.microbatch
        assert stage is not None
        needs = "R" if (stage, i) in self._recomputed else "BI"
        if task.kind in needs and i is not None and (stage, i) in self._fetched:
            yield ins.Await(own_buffer("fetched", stage, i, task.batch))
        for bucket in range(self._parts.get((task.kind, stage, i), 0)):
            assert i is not None
            version = task.batch - self._delay_of(stage, i)
            yield ins.PartialBackward(stage, i, version, task.batch, task.kind, bucket)

    def copies_of(self, task: Task) -> tuple[int, ...]:
        """The devices of the copies of a task's stage."""
        return self.copies[task.stage] if self.copies and task.stage is not None else ()

    def before(self, device: int, position: int) -> Iterator[ins.Instruction]:
        """What stands before a task: the sums over replicas or copies that are needed from then
        on, and their norms, if any stage clips; and the weights that it is the first to read."""
        for stage, batch in self._gathers.get((device, position), ()):
            if not self._sums and not self.copies[stage]:
                continue
            waits = ins.TakePart if self._shards else ins.AllGather
            yield waits(stage, batch) if self._sums else ins.Add(stage, batch)
            if self._clips:
                yield ins.Norm(stage, batch)
        if (weights := self._first_reads.get((device, position))) is not None:
            yield weights

    def after(self, task: Task) -> Iterator[ins.Instruction]:
        """What follows a task: the norm of gradients that are complete, if any stage clips."""
        summed = self._sums or self.copies_of(task)
        if self._clips and not summed and task.kind in "BW" and task.microbatch == self._last:
            assert task.stage is not None
            yield ins.Norm(task.stage, task.batch)


def _gathers(schedule: Schedule, updates: bool) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """Device and position in its row → the stages whose sums over the replicas are needed there
    first, each with its batch; the end of a row is the position behind its last task."""
    found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for device, row in enumerate(schedule.rows):
        life = sorted(enumerate(row), key=lambda entry: -entry[1].batch)
        for at, (_, task) in enumerate(life):
            if task.kind != "A":
                continue
            assert task.stage is not None
            if device != schedule.placement[task.stage]:
                continue  # that of a copy, which gives its gradients away
            position, batch = len(row), task.batch
            for there, other in life[at + 1 :]:
                kind = KINDS[other.kind]
                own = other.stage == task.stage
                waits = own and other.kind == "U" and updates and schedule.overlaps
                reads = own and "gradients" in (*kind.reads, *kind.writes)
                if waits or reads or other.kind == "C":
                    position, batch = there, other.batch
                    break
            found[device, position].append((task.stage, batch))
    return found
