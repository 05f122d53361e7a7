"""What devices wait for: why each does not compute, and what decides when the last one ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxpipe.ir import instruction as ins
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place
from fxpipe.simulator.events import Transfer
from fxpipe.simulator.simulation import Simulation, Span


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
    tasks = [position for position in range(len(ends)) if ins.letter_of(own[position])]
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
            case ins.Receive(buffer) | ins.Pop(buffer):
                transfer = events.transfers[buffer]
                source = transfer.source
                made = max(start, min(transfer.ready, end))
                arrived = max(made, min(transfer.end, end))
                _add(waiting, source, made - start)
                _add(copying, source, arrived - made)
            case ins.Send(buffer) | ins.Stash(buffer):
                transfer = events.transfers[buffer]
                _add(copying, transfer.target, max(min(transfer.end, end) - start, 0))
            case ins.Barrier() | ins.Pause():
                meeting += end - start
    known = warm_up + drain + sum(waiting.values()) + sum(copying.values()) + meeting
    return Idle(warm_up, drain, waiting, copying, meeting, max(total - known, 0))


def _add(times: dict[int, float], device: int, time: float) -> None:
    if time:
        times[device] = times.get(device, 0) + time


def critical_path(simulation: Simulation) -> tuple[Span | Transfer, ...]:
    """Walk back from the instruction that ends last, each time to what was waited for."""
    return tuple(reversed(list(_backwards(simulation))))


def _backwards(simulation: Simulation) -> Iterator[Span | Transfer]:
    events, lists = simulation.events, simulation.program.lists
    meetings = _Meetings(simulation)
    links = _before_on_link(simulation)
    device = max(range(simulation.devices), key=events.free)
    position = len(events.ends[device]) - 1
    while position >= 0:
        instruction = lists[device][position]
        start, end = events.starts[device][position], events.ends[device][position]
        here = Span(device, start, end, instruction, position)
        match instruction:
            case ins.Receive(buffer) | ins.Pop(buffer) if events.transfers[buffer].end > start:
                transfer = events.transfers[buffer]
                yield from _if_long(here._replace(start=transfer.end))
                yield from _if_long(transfer)
                while transfer.start > transfer.ready:  # the link was taken
                    former = events.transfers[links[transfer.buffer]]
                    yield former._replace(end=transfer.start)
                    transfer = former
                device, position = transfer.source, transfer.position
                sent, sender = events.starts[device][position], lists[device][position]
                yield from _if_long(Span(device, sent, transfer.ready, sender, position))
            case ins.Barrier() | ins.Pause():
                device, position, met = meetings.latest(device, position)
                yield from _if_long(here._replace(start=met))
            case _:
                yield from _if_long(here)
        position -= 1


def _if_long(part: Span | Transfer) -> Iterator[Span | Transfer]:
    if part.end > part.start:
        yield part


def _before_on_link(simulation: Simulation) -> dict[Buffer, Buffer]:
    """Value → the one that took its link before it."""
    latest: dict[tuple[int, int], Buffer] = {}
    before: dict[Buffer, Buffer] = {}
    for buffer, transfer in simulation.events.transfers.items():
        pair = transfer.source, transfer.target
        if pair in latest:
            before[buffer] = latest[pair]
        latest[pair] = buffer
    return before


class _Meetings:
    """The barriers and pauses: who comes last to each."""

    def __init__(self, simulation: Simulation) -> None:
        self._starts = simulation.events.starts
        self._of: dict[Place, tuple[type[ins.Instruction], int]] = {}
        self._places: dict[tuple[type[ins.Instruction], int], list[Place]] = {}
        for device, starts in enumerate(self._starts):
            count: dict[type[ins.Instruction], int] = {ins.Barrier: 0, ins.Pause: 0}
            for position in range(len(starts)):
                kind = type(simulation.program.lists[device][position])
                if kind in count:
                    meeting = kind, count[kind]
                    count[kind] += 1
                    self._of[Place(device, position)] = meeting
                    self._places.setdefault(meeting, []).append(Place(device, position))

    def latest(self, device: int, position: int) -> tuple[int, int, float]:
        """The device that comes last to the meeting at a place, where there, and when.

        The device itself, where it is not earlier than the others.
        """
        places = self._places[self._of[Place(device, position)]]
        last = max(places, key=lambda place: (self._starts[place[0]][place[1]], place[0] == device))
        return *last, self._starts[last[0]][last[1]]
