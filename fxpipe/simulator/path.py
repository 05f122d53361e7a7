"""The critical path: what decides when the last instruction ends."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.program import Barrier, Buffer, Instruction, Pause, Pop, Receive
from fxpipe.ir.walk import Place
from fxpipe.simulator.events import Transfer
from fxpipe.simulator.simulation import Simulation, Span


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
            case Receive(buffer) | Pop(buffer) if events.transfers[buffer].end > start:
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
            case Barrier() | Pause():
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
        self._of: dict[Place, tuple[type[Instruction], int]] = {}
        self._places: dict[tuple[type[Instruction], int], list[Place]] = {}
        for device, starts in enumerate(self._starts):
            count: dict[type[Instruction], int] = {Barrier: 0, Pause: 0}
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
