"""When the sums of gradients are needed, over replicas or over the copies of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.passes.lowering.lower import Sums


class Needed(Sums):
    """Where a schedule first needs the sums that its As begin."""

    def __init__(self, schedule: Schedule, updates: bool) -> None:
        """``updates``: whether its U tasks become updates."""
        self._needed = _needed(schedule, updates) if schedule.trains else {}

    def needed(self, device: int, position: int) -> Sequence[tuple[int, int]]:
        """See ``Sums.needed``."""
        return self._needed.get((device, position), ())


def _needed(schedule: Schedule, updates: bool) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """(Device, position in its row) → the stages, each with its batch, whose sums are first needed
    there. The position behind the last task is the end of the row."""
    gathers: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for device, row in enumerate(schedule.rows):
        life = sorted(enumerate(row), key=lambda entry: -entry[1].batch)
        for at, (_, task) in enumerate(life):
            if task.kind != "A":
                continue
            assert task.stage is not None
            if device != schedule.placement[task.stage]:
                continue  # a copy, which gives its gradients away
            position, batch = len(row), task.batch
            for there, later in life[at + 1 :]:
                kind = KINDS[later.kind]
                same = later.stage == task.stage
                waits = same and later.kind == "U" and updates and schedule.overlaps
                reads = same and "gradients" in kind.reads
                if waits or reads or later.kind == "C":
                    position, batch = there, later.batch
                    break
            gathers[device, position].append((task.stage, batch))
    return gathers
