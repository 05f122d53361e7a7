"""Lower a schedule over a plan to a program of compute alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from fxpipe.errors import InputError
from fxpipe.plan import Plan
from fxpipe.program import Backward, Barrier, Forward, Instruction, Pause, Program, Update
from fxpipe.schedule import KINDS, Schedule, Task

_LOWERED = "FBU"


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
    step takes, so it costs nothing.

    Attributes:
        plan: the stages and edges.
        updates: whether U tasks become updates; without an optimizer they become nothing.
        pause: whether each device pauses before its first backward, so that the caller can take
            the outputs and come back later with their gradients.
    """

    plan: Plan
    updates: bool = True
    pause: bool = False
    name: ClassVar[str] = "lower"

    def __call__(self, schedule: Schedule) -> Program:
        """Lower a verified schedule.

        Raises:
            InputError: the counts of stages differ, the schedule holds tasks that have no
                lowering yet, or it cannot be paused.
        """
        self._check(schedule)
        trains = schedule.trains
        edges = self.plan.edges
        return Program(
            name=schedule.name,
            microbatches=schedule.microbatches,
            placement=schedule.placement,
            edges=edges if trains else tuple(replace(edge, gradient=False) for edge in edges),
            lists=tuple(tuple(self._device(row, trains)) for row in schedule.rows),
            passes=(self.name,),
        )

    def _device(self, row: tuple[Task, ...], trains: bool) -> Iterator[Instruction]:
        paused = not self.pause
        for task in row:
            match task:
                case Task("F", int(i), int(stage)):
                    yield Forward(stage, i, keeps=trains)
                case Task("B", int(i), int(stage)):
                    if not paused:
                        yield Pause()
                        paused = True
                    yield Backward(stage, i)
                case _:
                    continue
        if not paused:
            yield Pause()  # a device without a backward: the caller resumes all of them together
        if trains and self.updates:
            yield Barrier()
            yield from (Update(t.stage) for t in row if t.kind == "U" and t.stage is not None)

    def _check(self, schedule: Schedule) -> None:
        if schedule.stages != len(self.plan.stages):
            raise InputError(
                f"schedule {schedule.name!r} is for {schedule.stages} stages and the plan has "
                f"{len(self.plan.stages)}; cut the model into {schedule.stages} stages or make "
                f"the schedule for {len(self.plan.stages)}"
            )
        kinds = {task.kind for row in schedule.rows for task in row}
        if unknown := sorted(kinds - set(_LOWERED)):
            names = ", ".join(KINDS[kind].name if kind in KINDS else kind for kind in unknown)
            raise InputError(
                f"schedule {schedule.name!r} has tasks that cannot be lowered: {names}; "
                "forward, backward and update (F, B, U) can"
            )
        if schedule.delay or any(task.batch for row in schedule.rows for task in row):
            raise InputError(
                f"schedule {schedule.name!r} lets batches overlap, which cannot be lowered yet; "
                "use delay=0 and tasks of this step's batch"
            )
        if self.pause:
            _check_pause(schedule)


def _check_pause(schedule: Schedule) -> None:
    if not schedule.trains:
        raise InputError(
            f"schedule {schedule.name!r} has no backward to pause before; lower it without pause"
        )
    for device, row in enumerate(schedule.rows):
        kinds = [task.kind for task in row]
        if "B" in kinds and "F" in kinds[kinds.index("B") :]:
            position = kinds.index("F", kinds.index("B"))
            raise InputError(
                f"schedule {schedule.name!r} cannot pause between forward and backward: device "
                f"{device} has {row[position]} at position {position}, after a backward; use one "
                "that runs all forwards first, such as gpipe"
            )
