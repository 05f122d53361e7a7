"""What sums a stage's gradients over several devices: the door between ``Lower`` and extensions."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir import instruction as ins
from fxpipe.ir.task import Task


class Sums:
    """Base of what makes the instructions of a schedule whose gradients are summed, by its As. All
    that a subclass leaves out does nothing."""

    def begin(self, device: int) -> Iterator[ins.Instruction]:
        """Yield what a device's list begins with."""
        yield from ()

    def of(self, task: Task, device: int) -> ins.Instruction | None:
        """What an A becomes on a device, if anything."""
        return None

    def parts(self, task: Task, version: int) -> Iterator[ins.Instruction]:
        """Yield what comes right before a backward that reads a version of the weights."""
        yield from ()

    def rest(self, task: Task) -> bool:
        """Whether ``parts`` runs a part of a backward, so that only the rest of it is left."""
        return False

    def waits(self, stage: int, batch: int) -> ins.Instruction | None:
        """What waits for the sum of a stage's gradients, unless nothing sums them."""
        return None
