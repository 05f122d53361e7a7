"""Ranks whose devices compute on streams: tensors go directly from device to device.

Instruction lists, streams and events are the same as in one process, except for the events of other
devices, which are not visible here. Transfers replace them: the stream that receives a value waits
for the transfer, and so does the stream that frees a sent value.

Receives are posted ahead of time: from each other rank up to ``Program.window`` of them, in the
order of this rank's list. The verifier proves that a program with this window comes to its end even
if each send blocks its device until the matching receive is posted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpipe.compiler.options import Options
from fxpipe.extensions.ranks.channels import RankBackend, RankChannels, explained
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.streams.lanes import Lanes
from fxpipe.extensions.streams.launching import (
    LaunchingChannels,
    LaunchingMachine,
    StreamBackend,
)
from fxpipe.ir.value import Buffer
from fxpipe.runtime.interpreter import Machine, Stopped

LOOK = 5e-5
"""Seconds between two checks of whether the device is done."""


class DeviceChannels(RankChannels, LaunchingChannels):
    """Channels from this rank's device to the devices of the other ranks, in one run."""

    def __init__(self, *args: Any) -> None:
        self._leaving: dict[Buffer, tuple[Tensor, Any]] = {}
        super().__init__(*args)

    def keep(self, device: int, buffer: Buffer, sent: Tensor, work: Any) -> None:
        self._leaving[buffer] = sent, work

    def arrive(self, machine: Machine, buffer: Buffer) -> Any:
        assert isinstance(machine, LaunchingMachine)
        if self._spec(buffer) is None:
            return LaunchingChannels.arrive(self, machine, buffer)
        return RankChannels.arrive(self, machine, buffer)

    def leave(self, buffer: Buffer) -> None:
        if buffer in self._leaving:
            with explained(self._stopped):
                self._leaving[buffer][1].wait()
            del self._leaving[buffer]

    def finish(self, lanes: Lanes, marks: Sequence[Any]) -> None:
        """Wait until the device is done. All ranks commit a step or none does, so each must know
        that it has reached the end, with no transfer pending."""
        while not all(map(lanes.reached, marks)):
            if self.stopping:
                raise Stopped
            time.sleep(LOOK)


class StreamRanks(RankBackend, StreamBackend):
    """Runs the list of this rank's device, which has streams."""

    between = DeviceChannels

    def __init__(self, group: RankGroup, options: Options) -> None:
        StreamBackend.__init__(self, [Lanes(options.here)], group)
        self._connect(options)

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        return self.lanes[0].nanoseconds(times) if times else []  # none of another rank's device
