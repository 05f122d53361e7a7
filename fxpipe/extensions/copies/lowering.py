"""The instructions of a schedule that keep the copies of a stage like their home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fxpipe.errors import InputError
from fxpipe.extensions.copies.opcodes import Add, Give, Share
from fxpipe.extensions.sums import Needed
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.ir.traced import DeferredNorm


class SumCopies(Needed):
    """A stage with copies shares its weights with them at the beginning of the step. An A on a copy
    gives the copy's gradients to the stage's own device, which adds them as late as possible.
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
    """

    def __init__(self, schedule: Schedule, plan: Plan, updates: bool) -> None:
        super().__init__(schedule, updates)
        self._copies, self._homes = schedule.working, schedule.placement

    def begin(self, device: int) -> Iterator[ins.Instruction]:
        for stage, copies in enumerate(self._copies):
            if copies and self._homes[stage] == device:
                yield Share(stage)

    def of(self, task: Task, device: int) -> ins.Instruction | None:
        assert task.stage is not None
        return Give(task.stage, device) if device in self._copies[task.stage] else None

    def parts(self, task: Task, version: int) -> Iterator[ins.Instruction]:
        yield from ()

    def rest(self, task: Task, whole: ins.Compute) -> ins.Compute:
        return whole

    def waits(self, stage: int, batch: int) -> ins.Instruction | None:
        return Add(stage, batch) if self._copies[stage] else None


def check_copies(recipe: Recipe, device: torch.device) -> None:
    """Raise InputError if the schedule runs a stage on several devices, and these are no CPUs."""
    if device.type != "cpu":
        raise InputError(
            f"schedule {recipe.name!r}, which has stages on several devices, is not possible on "
            f"{device.type} devices; run it on CPU devices, or take one that has each stage on one "
            'device, such as "zb-v"'
        )


def refuse_copied(schedule: Schedule, plan: Plan, deferred: Sequence[DeferredNorm]) -> None:
    """Raise InputError if a stage with copies writes a buffer that the next micro-batch reads."""
    moments = {norm.moments for norm in deferred}
    for stage, copies in zip(plan.stages, schedule.working, strict=False):
        written = [write.target for write in stage.writes if write.target not in moments]
        if copies and written:
            raise InputError(
                f"schedule {schedule.name!r} has stage {stage.index} on several devices, and its "
                f"forward writes {written[0]!r}, which each micro-batch reads as the one before it "
                "has left it; take a schedule without copies, or, for BatchNorm, give "
                'extensions=["deferred_batchnorm"]'
            )
