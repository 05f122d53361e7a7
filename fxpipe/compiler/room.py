"""What a cut must leave free for its devices to keep their memory limits as predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.errors import PartitionError
from fxpipe.passes.partition.work import Load, Machine
from fxpipe.words import bytes_text

_TRIES = 8


class Room:
    """What is known of the memory that the partition does not count atom by atom.

    What the graphs of a stage add while they run, for one, is known once they are made. Where a
    device is then predicted to hold more than it may, the difference is left free by the next cut.

    Attributes:
        firm: why a cut that was made cannot be made anew; empty where it can.
        kept: whether a cut is known to keep the limits.
        nearest: whether a cut that keeps no limit by its own count is worth being predicted.
    """

    def __init__(self, homes: Sequence[int], machine: Machine) -> None:
        """Nothing is known yet.

        Args:
            homes: stage → device.
            machine: the stages.
        """
        self.firm = ""
        self.kept = not machine.limited
        self.nearest = True
        self._homes = homes
        self._machine = machine
        self._reserved: dict[int, int] = {}
        self._left = _TRIES

    def machine(self) -> Machine:
        """The stages, with what is to be left free."""
        shares = [
            math.ceil(self._reserved.get(home, 0) / self._homes.count(home)) for home in self._homes
        ]
        return replace(self._machine, reserved=tuple(shares))

    def keeps(self, loads: Sequence[Load], machine: Machine, peaks: Sequence[float]) -> bool:
        """Whether a cut keeps the limits. If not, ``machine`` leaves more free from now on.

        Args:
            loads: stage → what the cut counts.
            machine: the stages that it was made for.
            peaks: device → the most bytes that it is predicted to hold.

        Raises:
            PartitionError: it does not, and no other cut is to be tried.
        """
        counted, limits = [0.0] * len(peaks), [0.0] * len(peaks)
        reserved = machine.reserved or (0,) * len(loads)
        for home, load, share, limit in zip(
            self._homes, loads, reserved, machine.limits, strict=True
        ):
            counted[home] += load.memory - share
            limits[home] += limit
        over = [device for device, peak in enumerate(peaks) if peak > limits[device]]
        if not over:
            self.kept = True
            return True
        self._left -= 1
        if self.firm or not self._left:
            device = max(over, key=lambda d: peaks[d] / limits[d])
            name = machine.name_of(self._homes.index(device))
            raise PartitionError(
                f"{name} is predicted to hold {bytes_text(peaks[device])} in a step and may take "
                f"{bytes_text(limits[device])}; {self.firm or 'raise memory_limits'}, or give more "
                "devices"
            )
        for device, peak in enumerate(peaks):
            more = math.ceil(peak - counted[device])
            if more > 0 or device in over:
                self._reserved[device] = max(more, self._reserved.get(device, more))
        beyond = any(load.memory > limit for load, limit in zip(loads, machine.limits, strict=True))
        self.nearest = self.nearest and not beyond
        return False
