"""Analyses of a simulation: idle time by cause, steady state, and what is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sums import GATHERING, beside
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program

_READERS = (ins.Forward, ins.Recompute, ins.Backward, ins.InputGrad, ins.WeightGrad, ins.Run)

_FIRST, _LAST = 17, 512
"""How many steps ``steady_state`` simulates first, and how many it does not simulate any more."""


@dataclass(frozen=True)
class Idle:
    """A device's idle time by cause, from the start until the last micro-batch is through.

    What comes after that, such as updates, does not count. ``Simulation.bubble`` is the mean of
    ``total`` over the devices, as a share of the time until then.

    Attributes:
        warm_up: before its first task.
        drain: after its last task of a micro-batch; its updates are not idle.
        waiting: another device → waiting in between until that device has made what comes next.
        copying: another device → waiting in between for transfers from it or, in a measured run,
            to it; the device itself → for what it offloads or fetches.
        meeting: waiting in between until all devices have come to a barrier or a pause.
        summing: waiting in between until gradients are summed over the replicas, or weights
            gathered.
        other: the rest: instructions that compute nothing and, in a measured run, the time between
            instructions.
    """

    warm_up: float
    drain: float
    waiting: Mapping[int, float]
    copying: Mapping[int, float]
    meeting: float
    summing: float
    other: float

    @property
    def total(self) -> float:
        waits = sum(self.waiting.values()) + sum(self.copying.values())
        return self.warm_up + self.drain + waits + self.meeting + self.summing + self.other


def idle_time(simulation: Simulation, device: int) -> Idle:
    """Return a device's idle time, from the start until the last micro-batch is through."""
    events, list_ = simulation.events, simulation.program.lists[device]
    through = simulation.through
    starts = [min(start, through) for start in events.starts[device]]
    ends = [min(end, through) for end in events.ends[device]]
    tasks = [position for position in range(len(ends)) if list_[position].letter]
    total = through - sum(ends[at] - starts[at] for at in tasks)
    if not tasks:
        return Idle(total, 0, {}, {}, 0, 0, 0)
    of_microbatch = [at for at in tasks if getattr(list_[at], "microbatch", None) is not None]
    first, last = tasks[0], (of_microbatch or tasks)[-1]
    after = sum(ends[at] - starts[at] for at in tasks if at > last)
    warm_up = starts[first]
    drain = through - ends[last] - after
    waiting: dict[int, float] = defaultdict(float)
    copying: dict[int, float] = defaultdict(float)
    meeting: float = 0
    summing: float = 0
    for position in range(first + 1, last):
        start, end = starts[position], ends[position]
        if end == start:
            continue
        match list_[position]:
            case ins.Receive(buffer):
                transfer = events.transfers[buffer]
                source = transfer.source
                made = max(start, min(transfer.ready, end))
                arrived = max(made, min(transfer.end, end))
                waiting[source] += made - start
                copying[source] += arrived - made
            case ins.Send(buffer):
                transfer = events.transfers[buffer]
                copying[transfer.target] += max(min(transfer.end, end) - start, 0)
            case ins.Barrier() | ins.Pause():
                meeting += end - start
            case x if x.opcode in GATHERING:
                summing += end - start
            case x if beside(x) is not None:
                copying[device] += end - start
    known = warm_up + drain + sum(waiting.values()) + sum(copying.values()) + meeting + summing
    waiting, copying = ({d: t for d, t in times.items() if t} for times in (waiting, copying))
    return Idle(warm_up, drain, waiting, copying, meeting, summing, max(total - known, 0))


@dataclass(frozen=True)
class Steady:
    """What steps take in the long run.

    Attributes:
        period: the time of a step.
        bubble: the share of the devices' time that is idle.
        cycle: after how many steps everything repeats, later by a fixed time; 0 if nothing did
            within the steps that were tried. The period is then the mean of their later half.
    """

    period: float
    bubble: float
    cycle: int


def steady_state(simulation: Simulation) -> Steady:
    """Simulate more and more steps until every instruction repeats.

    The times follow from maxima and sums, and such a system repeats itself after finitely many
    steps (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992). A step depends
    only on the ``depth + 1`` steps before it, so once that many repeat, all later ones do.

    Raises:
        InputError: the run was measured.
    """
    if simulation.again is None:
        raise InputError("a measured run cannot go on; simulate the program with its costs")
    depth = simulation.window.depth
    steps, cycle = _FIRST + depth, 0
    while not cycle and steps < _LAST:
        longer = simulation.again(steps)
        windows = [_ends(longer, step) for step in range(depth, steps)]
        cycle = _cycle(windows, depth + 1)
        steps *= 2
    apart = cycle or len(windows) // 2
    period = (max(windows[-1]) - max(windows[-1 - apart])) / apart
    work = sum(longer.busy) / longer.steps
    return Steady(period, 1 - work / (longer.devices * period) if period else 0.0, cycle)


def _ends(simulation: Simulation, step: int) -> list[float]:
    """The ends of the instructions of one whole step, on all devices. The first ``depth`` steps
    lack the tasks of earlier batches."""
    ends: list[float] = []
    depth = simulation.window.depth
    for list_, all_ends in zip(simulation.window.lists, simulation.events.ends, strict=True):
        lead = sum(depth + instruction.batch for instruction in list_)
        first = lead + (step - depth) * len(list_)
        ends += all_ends[first : first + len(list_)]
    return ends


def _cycle(windows: Sequence[Sequence[float]], reach: int) -> int:
    """How many steps apart the last ``reach`` steps repeat; 0 if they do not."""
    for cycle in range(1, (len(windows) - reach) // 2 + 1):
        if all(_repeats(windows[-k - cycle], windows[-k]) for k in range(1, reach + 1)):
            return cycle
    return 0


def _repeats(earlier: Sequence[float], later: Sequence[float]) -> bool:
    """Whether everything happens again, later by one fixed time."""
    return all(
        isclose(b - a, later[0] - earlier[0], rel_tol=1e-9, abs_tol=1e-12 * abs(b))
        for a, b in zip(earlier, later, strict=True)
    )


def peak_versions(program: Program) -> tuple[int, ...]:
    """Stage → the most versions of its weights that are needed at once."""
    most = [1] * program.stages
    for list_ in program.lists:
        for _, stage, live in live_versions(list_):
            most[stage] = max(most[stage], live)
    return tuple(most)


def live_versions(list_: tuple[ins.Instruction, ...]) -> list[tuple[int, int, int]]:
    """For each update of a device: its position, its stage, and how many versions of the stage's
    weights are needed after it.

    These are the newest version and the older ones that something reads later. Version 0 is that of
    the first step, and also stands for any before it.
    """
    last_read: dict[tuple[int, int], int] = {}
    for position, instruction in enumerate(list_):
        if isinstance(instruction, _READERS):
            last_read[instruction.stage, max(instruction.version, 0)] = position
    versions = []
    existing: dict[int, list[int]] = {}
    for position, instruction in enumerate(list_):
        if isinstance(instruction, ins.Update):
            stage = instruction.stage
            older = existing.setdefault(stage, [0])
            older[:] = [v for v in older if last_read.get((stage, v), -1) > position]
            versions.append((position, stage, len(older) + 1))
            older.append(max(instruction.writes, 0))
    return versions
