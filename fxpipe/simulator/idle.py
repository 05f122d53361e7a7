"""Why devices do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.ir.program import Barrier, Pause, Pop, Receive, Send, Stash, letter_of
from fxpipe.simulator.simulation import Simulation


@dataclass(frozen=True)
class Idle:
    """The time in which a device computes nothing until the last micro-batch is through, by cause.

    The updates that come after it do not count, as for ``Simulation.bubble``, which is the mean
    over the devices of ``total`` as a share of that time.

    Attributes:
        warm_up: before its first task.
        drain: after its last task of a micro-batch; its updates are not idle.
        waiting: another device → waiting in between until that one has made what comes next.
        copying: another device → waiting in between for transfers from it, or to it where they
            do not overlap.
        meeting: waiting in between until all devices have come to a barrier or a pause.
        other: what is left: instructions that compute nothing, and, where it was measured, all
            that lies between two instructions.
    """

    warm_up: float
    drain: float
    waiting: Mapping[int, float]
    copying: Mapping[int, float]
    meeting: float
    other: float

    @property
    def total(self) -> float:
        waits = sum(self.waiting.values()) + sum(self.copying.values())
        return self.warm_up + self.drain + waits + self.meeting + self.other


def idle_times(simulation: Simulation) -> tuple[Idle, ...]:
    """Device → its idle time, from the start until the last micro-batch is through."""
    return tuple(_idle(simulation, device) for device in range(simulation.devices))


def _idle(simulation: Simulation, device: int) -> Idle:
    events, own = simulation.events, simulation.program.lists[device]
    through = simulation.through
    starts = [min(start, through) for start in events.starts[device]]
    ends = [min(end, through) for end in events.ends[device]]
    tasks = [position for position in range(len(ends)) if letter_of(own[position])]
    total = through - sum(ends[at] - starts[at] for at in tasks)
    if not tasks:
        return Idle(total, 0, {}, {}, 0, 0)
    of_microbatch = [at for at in tasks if getattr(own[at], "microbatch", None) is not None]
    first, last = tasks[0], (of_microbatch or tasks)[-1]
    after = sum(ends[at] - starts[at] for at in tasks if at > last)
    warm_up = starts[first]
    drain = through - ends[last] - after
    waiting: dict[int, float] = {}
    copying: dict[int, float] = {}
    meeting: float = 0
    for position in range(first + 1, last):
        start, end = starts[position], ends[position]
        if end == start:
            continue
        match own[position]:
            case Receive(buffer) | Pop(buffer):
                transfer = events.transfers[buffer]
                source = transfer.source
                made = max(start, min(transfer.ready, end))
                arrived = max(made, min(transfer.end, end))
                _add(waiting, source, made - start)
                _add(copying, source, arrived - made)
            case Send(buffer) | Stash(buffer):
                transfer = events.transfers[buffer]
                _add(copying, transfer.target, max(min(transfer.end, end) - start, 0))
            case Barrier() | Pause():
                meeting += end - start
    known = warm_up + drain + sum(waiting.values()) + sum(copying.values()) + meeting
    return Idle(warm_up, drain, waiting, copying, meeting, max(total - known, 0))


def _add(times: dict[int, float], device: int, time: float) -> None:
    if time:
        times[device] = times.get(device, 0) + time
