"""How values go from one rank to another: what an extension may bring in place of torch's way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A transfer that has begun."""

    def wait(self) -> object:
        """Wait until it is done. Where the device has streams, the current one may wait instead."""


class Transport(Protocol):
    """One end of what carries values from one rank to another, until a transfer fails.

    Values are dense tensors, whose shape, dtype and strides both ends know from the plan. They
    arrive in the order in which they are sent. No method waits for the other rank.
    """

    def send(self, value: Tensor) -> Pending:
        """Begin to send a value. It does not change, and it is kept, with the work, until it is
        known to have arrived."""

    def receive(self, room: Tensor) -> Pending:
        """Begin to receive the next value into ``room``, which has it when the work is done."""

    def abort(self) -> None:
        """End whatever has begun, at both ends, so that each ``wait`` raises a RuntimeError. It is
        called by another thread. Later transfers use another transport."""


class Direction(NamedTuple):
    """What the two ends of a transport are made for. Both are made at the same time, each in a
    thread that may wait for the other.

    Attributes:
        source: the index of the device that sends, in its pipeline.
        target: that of the device that receives.
        sends: whether this end is the source.
        device: where the tensors of this end are.
        store: a ``torch.distributed.Store`` in which nobody but the two ends writes.
        timeout: how long a rank may be late.
        standard: makes the transport of fxpipe, a process group of torch.distributed.
    """

    source: int
    target: int
    sends: bool
    device: torch.device
    store: Any
    timeout: timedelta
    standard: Callable[[], Transport]


MakeTransport = Callable[[Direction], Transport]
"""Makes this rank's end of a transport."""
