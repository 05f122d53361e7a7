"""Lower a schedule over a plan to a program that only computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fxpipe.errors import InputError
from fxpipe.extend import find
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BESIDE, BUILT_IN, KINDS, Task
from fxpipe.ir.value import HOST
from fxpipe.parts import Parts
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

    A failure before the first update must leave every weight as it was. So with a flush all updates
    of a device come behind one barrier at its end; the step waits for the last device anyway.
    Where batches overlap there is no barrier, and updates stay where the schedule has them.

    All tasks of batch b (0 is this step's) on a stage read version b − the stage's delay
    there. The update from batch b makes version b + 1, which user tasks behind it read. A forward
    whose micro-batch is recomputed keeps its inputs only. Where stages clip, each tells all others
    the norm of its gradients as soon as these are complete.

    An A begins to sum a stage's gradients over several devices, as a ``Sums`` says: over replicas,
    or copies of the stage. Where there is one of each it becomes nothing. The device waits for the
    sum as late as possible: before the first task that needs it, or before its first clip, because
    all stages wait for all norms. If there is no such task, or only updates behind a flush, it
    waits at the end.

    Attributes:
        plan: the stages and edges.
        updates: whether U tasks become updates; without an optimizer they become nothing.
        pause: whether each device pauses before its first backward, so that the caller can take
            the outputs and later provide their gradients; in a schedule with a flush, whose
            devices run all forwards first, such as gpipe.
        replicas: how many pipelines run the program side by side.
        only: the devices of which lists are made, the others' stay empty; by default all.
    """

    plan: Plan
    updates: bool = True
    pause: bool = False
    replicas: int = 1
    only: Collection[int] = ()
    name: ClassVar[str] = "lower"

    @without_collection()
    def __call__(self, schedule: Schedule) -> Program:
        """Lower a verified schedule.

        Raises:
            InputError: the numbers of stages differ; its edges leave a stage side by side with one
                that it sends a value; it does not sum the gradients of replicas or copies; or a
                task needs summed gradients, of which each replica has only a part.
        """
        _check(schedule, self.plan, self.replicas)
        instructions = _Instructions(schedule, self)
        return Program(
            name=schedule.name,
            microbatches=schedule.microbatches,
            placement=schedule.placement,
            copies=schedule.working,
            edges=self.plan.edges,
            gradients=self.plan.gradients if schedule.trains else (),
            lists=tuple(
                tuple(self._device(instructions, schedule, device))
                if device in (self.only or (device,))
                else ()
                for device in range(schedule.devices)
            ),
            passes=(self.name,),
            replicas=self.replicas,
        )

    def _device(
        self, instructions: _Instructions, schedule: Schedule, device: int
    ) -> Iterator[ins.Instruction]:
        paused = not self.pause
        flush = not schedule.overlaps
        row = schedule.rows[device]
        behind: list[ins.Instruction] = []  # what comes behind the barrier
        yield from instructions.sums.begin(device)
        for position, task in enumerate(row):
            if task.kind in "BI" and not paused:
                yield ins.Pause()
                paused = True
            if task.kind == "U" and not self.updates:
                continue
            if task.kind == "A":
                if (begun := instructions.sums.of(task, device)) is not None:
                    yield begun
                continue
            yield from instructions.before(device, position)
            yield from instructions.parts(task)
            instruction = instructions.of(task, position)
            updates = isinstance(instruction, ins.Update)
            if flush and (updates or (behind and task.kind not in BUILT_IN)):
                behind.append(instruction)
            else:
                yield instruction
                yield from instructions.after(task)
        if not paused:
            yield ins.Pause()  # a device without a backward: all devices resume together
        yield from instructions.before(device, len(row))
        if flush and schedule.trains and self.updates:
            yield ins.Barrier()
            yield from behind


def _check(schedule: Schedule, plan: Plan, replicas: int) -> None:
    """Check that a schedule can be lowered over a plan; see ``Lower``.

    Raises:
        InputError: it cannot.
    """
    if schedule.stages != len(plan.stages):
        raise InputError(
            f"schedule {schedule.name!r} is for {schedule.stages} stages and the plan has "
            f"{len(plan.stages)}; cut the model into {schedule.stages} stages or make "
            f"the schedule for {len(plan.stages)}"
        )
    for edge in plan.edges if schedule.edges is not None else ():
        if HOST not in (edge.source, edge.target):
            if edge.target not in schedule.behind[edge.source]:
                raise InputError(
                    f"stage {edge.source} sends {edge.value} to stage {edge.target}, and the edges "
                    f"of schedule {schedule.name!r} let neither wait for the other; add "
                    f"({edge.source}, {edge.target}) to them, or cut the model elsewhere"
                )
    copied = any(schedule.working)
    if (replicas > 1 or copied) and schedule.trains and "A" not in schedule.kinds:
        who = "copies of a stage" if copied else f"{replicas} replicas"
        raise InputError(
            f"schedule {schedule.name!r} has no A, and the gradients of {who} would never be "
            "summed; add them with add_reduce, or write A yourself"
        )
    if replicas > 1 and schedule.copies:
        raise InputError(
            f"schedule {schedule.name!r} has copies of stages, and {replicas} replicas of "
            "the pipeline; use a schedule without copies, or one replica"
        )


class Beside(Protocol):
    """What makes the instructions of the tasks that run beside others, of a schedule and a plan."""

    def of(self, task: Task) -> ins.Instruction:
        """The instruction that begins such a task."""
        ...

    def before(self, task: Task) -> Iterator[ins.Instruction]:
        """Yield what another task first waits for."""
        ...


class Sums:
    """Makes the instructions of a schedule whose gradients are summed, by its As. Extensions do;
    this one is for a schedule that sums nothing."""

    def begin(self, device: int) -> Iterator[ins.Instruction]:
        """Yield what a device's list begins with."""
        return iter(())

    def of(self, task: Task, device: int) -> ins.Instruction | None:
        """What an A becomes on a device, if anything."""
        return None

    def parts(self, task: Task, version: int) -> Iterator[ins.Instruction]:
        """Yield what comes right before a backward that reads a version of the weights."""
        return iter(())

    def rest(self, task: Task, whole: ins.Compute) -> ins.Compute:
        """What runs the rest of a backward, given what runs the whole, where ``parts`` has run a
        part."""
        return whole

    def waits(self, stage: int, batch: int) -> ins.Instruction | None:
        """What waits for the sum of a stage's gradients, unless nothing sums them."""
        return None

    def needed(self, device: int, position: int) -> Sequence[tuple[int, int]]:
        """The stages, each with its batch, whose sums are first needed at a position of a row."""
        return ()


class _Instructions:
    """The instructions of each task of a schedule."""

    def __init__(self, schedule: Schedule, lower: Lower) -> None:
        self._trains = schedule.trains
        self._delays = schedule.delays
        self._clips = "C" in schedule.kinds
        # stage → the task that completes its gradients
        self._last = {
            task.stage: task
            for row in schedule.rows
            for task in sorted(row, key=lambda task: -task.batch)  # as a batch meets them
            if task.kind in "BIW"
        }
        self._frozen = schedule.frozen
        self._recomputed = schedule.indices_of("R")
        self._beside: dict[str, Beside] = {}
        for kind, name in BESIDE.items():
            if kind in schedule.kinds and name not in self._beside:
                made = getattr(Parts, name).find(f"the {kind} of schedule {schedule.name!r}")
                self._beside[name] = made(schedule, lower.plan)
        self._updates = {
            task.stage: (-task.batch, position)
            for row in schedule.rows
            for position, task in enumerate(row)
            if task.kind == "U" and lower.updates
        }
        self.sums = Sums()
        if lower.replicas > 1 or any(schedule.working):
            part = Parts.sum_replicas if lower.replicas > 1 else Parts.sum_copies
            make = part.find(f"schedule {schedule.name!r}")
            self.sums = make(schedule, lower.plan, lower.updates)

    def of(self, task: Task, position: int) -> ins.Instruction:
        """The instruction that runs a task at a position of its row."""
        kind, stage, i, batch = task.kind, task.stage, task.microbatch, task.batch
        assert stage is not None
        version = batch - self._delays[stage]
        if own := KINDS[kind].make:
            update = self._updates.get(stage)
            if update is not None and update < (-batch, position):
                version = batch + 1
            made: ins.Instruction = own(stage, i, version, batch)
            return made
        if kind == "C":
            return _clipping("clip", stage, batch)
        if kind in BESIDE:
            return self._beside[BESIDE[kind]].of(task)
        if i is None:
            return ins.Update(stage, batch, batch + 1, batch)
        if kind == "F":
            again = (stage, i) in self._recomputed
            return ins.Forward(stage, i, version, batch, self._trains and not again, again)
        if kind in "BW":
            make = ins.Backward if kind == "B" else ins.WeightGrad
            return self.sums.rest(task, make(stage, i, version, batch))
        if kind == "I":
            return ins.InputGrad(stage, i, version, batch, (i, stage) in self._frozen)
        return ins.Recompute(stage, i, version, batch)

    def parts(self, task: Task) -> Iterator[ins.Instruction]:
        """Yield what comes right before a task: the wait for what runs beside it, and parts of a
        backward."""
        assert task.stage is not None
        for beside in self._beside.values():
            yield from beside.before(task)
        yield from self.sums.parts(task, task.batch - self._delays[task.stage])

    def before(self, device: int, position: int) -> Iterator[ins.Instruction]:
        """Yield what a position waits for: sums, with their norms if stages clip."""
        for stage, batch in self.sums.needed(device, position):
            if (waits := self.sums.waits(stage, batch)) is None:
                continue
            yield waits
            if self._clips:
                yield _clipping("norm", stage, batch)

    def after(self, task: Task) -> Iterator[ins.Instruction]:
        """Yield the norm of the gradients that a task completes, if stages clip."""
        if self._clips and self._last.get(task.stage) == task:
            assert task.stage is not None
            if self.sums.waits(task.stage, task.batch) is None:
                yield _clipping("norm", task.stage, task.batch)


def _clipping(opcode: str, stage: int, batch: int) -> ins.Instruction:
    """An instruction of clipping, which its extension has."""
    clipping: ins.Instruction = find("instruction", opcode, "a schedule with C")(stage, batch)
    return clipping
