"""A schedule's window as its rules look at it: where each task of a batch stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

from fxpipe.errors import Fault, near
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task, is_whole
from fxpipe.ir.walk import Key
from fxpipe.verify.spans import counts_faults


class Spot(NamedTuple):
    """Where a window holds a task, and the batch for which it runs there."""

    device: int
    position: int
    batch: int

    @property
    def moment(self) -> tuple[int, int]:
        """When a batch comes by, among the moments of its device.

        Batch t meets a task of batch b in step t − b: its life on a device goes through the tasks
        in the order of (−b, position).
        """
        return -self.batch, self.position


class Window:
    """A schedule and what follows from it.

    Attributes:
        schedule: one whose counts and placement are right.
        spots: each well-formed task → where it stands first; row after row, in order.
        faults: of the tasks by themselves, and of those that are there twice.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.spots: dict[Key, Spot] = {}
        self.faults = list(self._read())

    def text(self, spot: Spot) -> str:
        """The task at a spot."""
        return str(self.schedule.rows[spot.device][spot.position])

    def fault(self, spot: Spot, what: str, cure: str) -> Fault:
        """A fault of the task at a spot."""
        return Fault(what, cure, spot.device, spot.position, self.text(spot))

    @cached_property
    def by_stage(self) -> Sequence[Sequence[tuple[tuple[int, int], str, int | None, Spot]]]:
        """Stage → moment, kind, micro-batch and spot of its tasks, in the order of a batch."""
        found: list[list[tuple[tuple[int, int], str, int | None, Spot]]] = [
            [] for _ in self.schedule.placement
        ]
        for (kind, i, stage), spot in self.spots.items():
            found[stage].append((spot.moment, kind, i, spot))
        if self.schedule.depth:
            for own in found:
                own.sort(key=lambda entry: entry[0])
        return found

    def _read(self) -> Iterator[Fault]:
        """Fill in ``spots``; the fault of each task that is wrong by itself or there twice."""
        placement = self.schedule.placement
        for device, row in enumerate(self.schedule.rows):
            for position, task in enumerate(row):
                wrong = _malformed(self.schedule, task)
                if wrong is None:
                    stage = task.stage
                    assert stage is not None
                    here = Spot(device, position, task.batch)
                    first = self.spots.setdefault((task.kind, task.microbatch, stage), here)
                    if first is not here:
                        where = f"device {first.device}, position {first.position}"
                        wrong = f"it is there already: {where}", "keep one"
                    elif placement[stage] != device:
                        wrong = f"stage {stage} is on device {placement[stage]}", "move it there"
                if wrong is not None:
                    yield Fault(*wrong, device, position, str(task))


def frame_faults(schedule: Schedule) -> Iterator[Fault]:
    """The counts, the placement and the delays; the tasks cannot be judged without them."""
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            if not isinstance(task, Task) or not is_whole(task):
                cure = "write tasks of whole numbers, such as F(0)"
                yield Fault("it is no task of whole numbers", cure, device, position, repr(task))
                return
    for number in (schedule.microbatches, *schedule.placement, *schedule.delays):
        if not isinstance(number, Integral):
            what = f"a count, a device or a delay is {number!r}"
            yield Fault(what, "give whole numbers")
            return
    if schedule.microbatches < 1:
        yield Fault(f"it has {schedule.microbatches} micro-batches", "give it at least 1")
    if not schedule.placement:
        yield Fault("it has no stages", "place at least one")
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.devices:
            yield Fault(
                f"stage {stage} is placed on device {device}",
                f"place it on one of the {schedule.devices} devices, numbered from 0",
            )
    if len(schedule.delays) != schedule.stages:
        yield Fault(
            f"it has {len(schedule.delays)} delays for {schedule.stages} stages",
            "give one for all stages, or one for each",
        )
    if min(schedule.delays, default=0) < 0:
        yield Fault(f"its delay is {schedule.delay}", "give at least 0")
    held = sum(map(len, schedule.rows))
    reach = max(schedule.depth, *schedule.delays, 0)
    yield from counts_faults(schedule.stages, schedule.microbatches, held, reach)


def _malformed(schedule: Schedule, task: Task) -> tuple[str, str] | None:
    """What is wrong with a task by itself, and the cure."""
    kind, i, stage = KINDS.get(task.kind), task.microbatch, task.stage
    if kind is None:
        return f"there is no kind of task {task.kind!r}", near(task.kind, KINDS)
    if stage is None:
        return "it names no stage", "name one"
    if not 0 <= stage < schedule.stages:
        return f"there is no stage {stage}", f"name one of the {schedule.stages}, from 0"
    if task.batch > 0:
        return (
            "it belongs to a later step's batch",
            "give it this step's batch, 0, or that of an earlier step, such as -1",
        )
    if not kind.per_microbatch:
        if i is not None:
            return "it comes once a step, not for a micro-batch", "leave the micro-batch out"
    elif i is None:
        return "it names no micro-batch", "name one"
    elif not 0 <= i < schedule.microbatches:
        count = schedule.microbatches
        return f"there is no micro-batch {i}", f"name one of the {count}, from 0"
    return None
