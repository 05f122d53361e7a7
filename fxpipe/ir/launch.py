"""Launches: on which stream of its device an instruction runs, and which events it waits for.

Only devices with streams, such as CUDA devices, have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.ir.value import batch_mark

COMPUTE = "compute"
"""The stream on which a device computes; all its memory belongs to it."""


class Event(NamedTuple):
    """A point in the work of a stream: the end of the instruction that records it.

    Attributes:
        number: its number; one instruction records it, once a step.
        batch: the step in which it is recorded: 0 for this one, −1 for the one before. In the first
            step nobody waits for an event of the step before.
    """

    number: int
    batch: int = 0

    def __str__(self) -> str:
        return f"e{self.number}{batch_mark(self.batch)}"


@dataclass(frozen=True, slots=True)
class Launch:
    """How an instruction is handed to a device with streams.

    A stream runs its instructions in the order of their launches, beside the other streams. An
    instruction can be launched once the events that it waits for are recorded and the value that
    it receives is sent. An instruction that is left out, because its batch does not exist in the
    first steps or in the flush, still waits and records.

    Attributes:
        stream: the stream that runs it.
        waits: the events after which it starts, of any device.
        record: the event at its end, if anything waits for it.
    """

    stream: str = COMPUTE
    waits: tuple[Event, ...] = ()
    record: Event | None = None
