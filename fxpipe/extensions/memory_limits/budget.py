"""Cuts again until no device is predicted to hold more than it may."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.compiler.placement import Budget
from fxpipe.errors import PartitionError
from fxpipe.formatting import bytes_text
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.partition.work import StageDevices, StageLoad

_TRIES = 8
"""The most cuts that are tried."""

_MOVING = 3
"""How many micro-batches a stage that offloads them holds: one is stored, one computed, and one
fetched."""


class MemoryBudget(Budget):
    """The device memory that a cut has to leave free, learned from the peaks of earlier cuts.

    The partition counts memory node by node. What a stage's graphs need while they run is known
    only when they are made. If a device is then predicted to exceed its limit, the next cut leaves
    the difference free.
    """

    def __init__(self, schedule: Schedule, machine: StageDevices) -> None:
        """Limit what the stages of this schedule hold."""
        # a stage that recomputes holds its inputs longer than all else
        rows = [[task for task in row if task.kind not in "ROP"] for row in schedule.rows]
        plain = replace(schedule, rows=tuple(map(tuple, rows)))
        saved, arrived = (_held(schedule, each.kept().stages) for each in (schedule, plain))
        super().__init__(replace(machine, peaks=saved, arrived=arrived))
        self._placement = schedule.placement
        self._reserved: dict[int, int] = {}
        self._left = _TRIES

    def keeps(self, loads: Sequence[StageLoad], peaks: Sequence[float]) -> bool:
        machine = self.machine
        counted, limits = [0.0] * len(peaks), [0.0] * len(peaks)
        for device, load, share, limit in zip(
            self._placement, loads, machine.reserved, machine.limits, strict=True
        ):
            counted[device] += load.memory - share
            limits[device] += limit
        over = [device for device, peak in enumerate(peaks) if peak > limits[device]]
        if not over:
            self.kept = True
            return True
        self._left -= 1
        if self.way_out or not self._left:
            device = max(over, key=lambda d: peaks[d] / limits[d])
            name = machine.name_of(self._placement.index(device))
            raise PartitionError(
                f"{name} is predicted to hold {bytes_text(peaks[device])} in a step and may take "
                f"{bytes_text(limits[device])}; {self.way_out or 'raise memory_limits'}, give "
                'schedule="auto", with which stages recompute and offload what they must, or more '
                "devices",
                limited=True,
            )
        for device, peak in enumerate(peaks):
            more = math.ceil(peak - counted[device])
            if more > 0 or device in over:
                self._reserved[device] = max(more, self._reserved.get(device, more))
        shares = [
            math.ceil(self._reserved.get(device, 0) / self._placement.count(device))
            for device in self._placement
        ]
        self.machine = replace(machine, reserved=tuple(shares))
        beyond = any(load.memory > limit for load, limit in zip(loads, machine.limits, strict=True))
        self.nearest = self.nearest and not beyond
        return False


def _held(schedule: Schedule, kept: Sequence[int]) -> tuple[int, ...]:
    """Stage → of the micro-batches between forward and backward those that it does not offload."""
    stored = Counter(task.stage for row in schedule.rows for task in row if task.kind == "O")
    windows = schedule.depth + 1
    return tuple(
        min(count, windows * (schedule.microbatches - stored[stage]) + _MOVING)
        if stored[stage]
        else count
        for stage, count in enumerate(kept)
    )
