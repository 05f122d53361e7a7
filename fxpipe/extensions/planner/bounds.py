"""Lower bounds on the time and memory of a step, from its schedule: nothing is lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fxpipe.extensions.simulator.costs import Times
from fxpipe.extensions.simulator.sizes import Sizes, Workspace
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.passes.schedule import Recompute

Modes = tuple[Recompute, ...]
"""Stage → whether it recomputes, or offloads."""

NEVER: Recompute = "never"
ALWAYS: Recompute = "always"


def least_seconds(times: Times, schedule: Schedule, recompute: Modes = ()) -> float:
    """A lower bound on the time of a step: each device has to do its work. With a flush it also
    waits for its first micro-batch to arrive, and its last backward has to return to stage 0, along
    the schedule's edges.

    Args:
        schedule: without recomputation.
        recompute: which stages recompute; empty if none does.
    """
    kinds, flush, devices = schedule.kinds, not schedule.overlaps, schedule.devices
    work, weights = [0.0] * devices, [0.0] * devices
    # device → the time of a micro-batch up to the first of its stages, and of the way back; stage →
    # the same up to its end
    ways: dict[int, tuple[float, float]] = {}
    ends: dict[int, tuple[float, float]] = {}
    for s, home in enumerate(schedule.placement):
        before = [ends[source] for source in schedule.beside[0][s]]
        down = max((there for there, _ in before), default=0.0)
        up = max((back for _, back in before), default=0.0)
        # whole backwards, backwards in halves, or some of both
        forward, backward = times["F", s], min(times[x, s] for x in "BI" if x in kinds)
        whole = times["B", s] if "B" in kinds else inf
        if "I" in kinds:
            whole = min(whole, times["I", s] + times["W", s])
        again = times["R", s] if recompute and recompute[s] == "always" else 0.0
        work[home] += schedule.microbatches * (forward + backward + again)
        weights[home] += schedule.microbatches * (whole - backward)
        there, back = ways.get(home, (down, up))
        ways[home] = min(there, down), min(back, up)
        ends[s] = down + forward, up + backward
    return max(
        work[home] + max(weights[home] + flush * there, flush * (there + back))
        for home, (there, back) in ways.items()
    )


@dataclass(frozen=True)
class LeastMemory:
    """Lower bounds on the memory of devices.

    A device holds parameters and optimizer state, and follows its tasks in order: what a forward
    saves stays until its backward, and is there again when a backward begins that had it
    recomputed or offloaded. What arrives from other devices stays with it.

    Attributes:
        schedule: without recomputation and offloading.
        sizes: of its micro-batches.
        plan: its stages.
    """

    schedule: Schedule
    sizes: Sizes
    plan: Plan

    def of(self, device: int, recompute: Modes, offload: Modes) -> float:
        """Bytes that a device holds at least at its peak; empty modes if no stage has them."""
        sizes, held = self.sizes, self.schedule.held_by(device)
        arriving = self._arriving(device)
        stays: dict[int, int] = {}  # stage → bytes from forward to backward
        again: dict[int, int] = {}  # stage → how many more there are when its backward begins
        for s in held:
            kept = [v for v in arriving[s] if v in sizes.holds.get(s, ())]
            saved = stays[s] = sizes.saved.get(s, 0) + self._values(kept)
            if recompute and recompute[s] != "never":
                stays[s] = self._values(arriving[s]) if recompute[s] == "always" else 0
            if offload and offload[s] != "never":
                stays[s] = 0
            again[s] = saved - stays[s]
        level = sum(sizes.parameters.get(s, 0) + sizes.optimizer.get(s, 0) for s in held)
        row = self.schedule.rows[device]
        for task in row:  # micro-batches of earlier batches are there already
            if task.kind in "BI" and task.stage in stays:
                level -= task.batch * stays[task.stage]
        peak, summed = level, set[int]()
        for task in row:
            at = task.stage
            if at is None:
                continue
            peak = max(peak, level + self._running(task, at, again, at in summed))
            if task.kind == "F":
                level += stays[at]
            elif task.kind in "BI":
                level -= stays[at]
            if task.kind in "IW":
                level += sizes.deferred.get(at, 0) * (1 if task.kind == "I" else -1)
            if task.kind in "BW" and at not in summed:
                summed.add(at)
                level += sizes.gradients.get(at, 0)
            elif task.kind == "U" and at in summed:
                level -= sizes.gradients.get(at, 0)
        return peak

    def _running(self, task: Task, stage: int, again: Mapping[int, int], adds: bool) -> int:
        """The least bytes that a task adds while it runs."""
        if task.kind == "U":
            return self.sizes.updating.get(stage, 0)
        runs = self.sizes.adding if adds else self.sizes.runs
        key = task.kind, stage
        run = runs.get(key, self.sizes.runs.get(key, Workspace((0,))))
        return run.peak(run.freed) + (again[stage] if task.kind in "BI" else 0)

    def _arriving(self, device: int) -> dict[int, Sequence[str]]:
        """Stage → what it alone, or it first, gets from elsewhere."""
        placement, seen = self.schedule.placement, set[str]()
        found: dict[int, Sequence[str]] = {}
        for s in self.schedule.held_by(device):
            own = [
                edge.value
                for edge in self.plan.edges_into(s)
                if edge.source < 0 or placement[edge.source] != device
            ]
            found[s] = [value for value in dict.fromkeys(own) if value not in seen]
            seen.update(own)
        return found

    def _values(self, names: Sequence[str]) -> int:
        return sum(self.sizes.values.get(name, 0) for name in names)
