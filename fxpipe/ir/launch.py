"""How the instructions of a device that works by itself are launched: streams, and events between.

Devices that do one instruction after another have none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.ir.value import HOST, batch_mark

COMPUTE = "compute"
"""The stream on which a device computes, and which all its memory belongs to."""

OFFLOAD, PREFETCH = "offload", "prefetch"
"""The streams on which a device stores what its stages keep, and fetches it again."""


def arrivals(source: int) -> str:
    """The stream on which values arrive from a device: ``in0``; ``in`` for the caller's."""
    return "in" if source == HOST else f"in{source}"


class Event(NamedTuple):
    """A point in the work of a stream: the end of the instruction that records it.

    Attributes:
        number: one instruction records it, once a step.
        batch: the step in which it does: 0 for this one, −1 for the one before. Before the first
            step there was nothing to wait for.
    """

    number: int
    batch: int = 0

    def __str__(self) -> str:
        return f"e{self.number}{batch_mark(self.batch)}"


@dataclass(frozen=True, slots=True)
class Launch:
    """How an instruction is handed to a device that works by itself.

    A stream does its instructions in the order in which they are launched, streams side by side.
    Launching waits for nothing but this: an event that is waited for has been recorded, a value
    that arrives has been sent. Where an instruction is left out, because its batch does not exist
    in the first steps or in the flush, it still waits and records.

    Attributes:
        stream: the stream of its device that does it.
        waits: the events that it starts after, of any device.
        record: the event at its end, if somebody waits for it.
    """

    stream: str = COMPUTE
    waits: tuple[Event, ...] = ()
    record: Event | None = None
