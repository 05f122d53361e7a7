"""Where the instructions of a program stand in its picture: in a row below all they wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Event
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place, Wait, waits_of, walk

Column = tuple[int, str]
"""A device and one of its streams, which is "" where devices have none."""


@dataclass(frozen=True)
class Rows:
    """The rows of a program's instructions; the program may be invalid.

    Attributes:
        program: the program.
        at: place → row. The instructions of a column have different rows, in order.
        stuck: the places at which a device waits for ever.
        never: these, and those behind them.
    """

    program: Program
    at: dict[Place, int]
    stuck: frozenset[Place]
    never: frozenset[Place]

    def instruction(self, place: Place) -> ins.Instruction:
        return self.program.lists[place.device][place.position]

    def column(self, place: Place) -> Column:
        launches = self.program.launches
        return place.device, launches[place.device][place.position].stream if launches else ""

    def columns(self, devices: range) -> list[Column]:
        """The columns of some devices: for each the one that computes, then others by name."""
        usual = COMPUTE if self.program.launches else ""
        found = {self.column(place) for place in self.at} | {(device, usual) for device in devices}
        kept = [column for column in found if column[0] in devices]
        return sorted(kept, key=lambda column: (column[0], column[1] != usual, column[1]))

    @cached_property
    def transfers(self) -> list[tuple[Place, Place, Buffer]]:
        """The send and the receive of each value that is sent in the same step."""
        ends: list[dict[Buffer, Place]] = [{}, {}]
        for place in sorted(self.at):
            x = self.instruction(place)
            if isinstance(x, ins.Send | ins.Receive):
                ends[isinstance(x, ins.Receive)].setdefault(x.buffer, place)
        sent, received = ends
        return [(sent[b], there, b) for b, there in received.items() if b in sent]

    @cached_property
    def events(self) -> list[tuple[Place, Place, Event]]:
        """The instruction that records an event, and the one that waits for it in the same step on
        another stream."""
        launched = [
            (Place(device, position), launch)
            for device, launches in enumerate(self.program.launches)
            for position, launch in enumerate(launches)
        ]
        recorded = {launch.record: place for place, launch in launched if launch.record}
        return [
            (recorded[event], place, event)
            for place, launch in launched
            for event in launch.waits
            if event in recorded and self.column(recorded[event]) != self.column(place)
        ]


def rows_below(program: Program) -> Rows:
    """Place the instructions, those that never run last."""
    lengths = [*map(len, program.lists)]
    if [*map(len, program.launches)] != lengths:
        program = replace(program, launches=())  # which the verifier tells
    waits = waits_of(program)
    walked = walk(lengths, waits)
    placed = _Placed(Rows(program, {}, frozenset(), frozenset()), waits)
    for device, stop in walked.turns:
        placed.go_on(device, stop)
    never = frozenset(
        Place(device, position)
        for device, length in enumerate(lengths)
        for position in range(placed.done[device], length)
    )
    stuck = frozenset(Place(device, wait[0]) for device, wait in walked.stuck.items())
    for device, length in enumerate(lengths):
        placed.go_on(device, length)
    return replace(placed.rows, stuck=stuck, never=never)


class _Placed:
    """Instructions that are placed one by one, none before one that it waits for."""

    def __init__(self, rows: Rows, waits: Iterable[Iterable[Wait]]) -> None:
        self.rows = rows
        self.done = [0] * len(rows.program.lists)
        self._awaited: dict[Place, list[Place]] = {}
        for device, own in enumerate(waits):
            for position, *on in own:
                self._awaited.setdefault(Place(device, position), []).append(Place(*on))
        self._free: dict[Column, int] = {}
        self._lowest: dict[Place, int] = {}  # of a device's instructions up to a place

    def go_on(self, device: int, stop: int) -> None:
        """Place a device's instructions up to a position."""
        for position in range(self.done[device], stop):
            self._place(Place(device, position))
        self.done[device] = max(stop, self.done[device])

    def _place(self, place: Place) -> None:
        column, before = self.rows.column(place), Place(place.device, place.position - 1)
        awaited, row_of = self._awaited.get(place, []), self.rows.at
        if isinstance(self.rows.instruction(place), ins.Meeting):  # of all streams
            awaited, row_of = [*awaited, before], self._lowest
        row = max([self._free.get(column, 0), *(row_of.get(on, -1) + 1 for on in awaited)])
        self.rows.at[place], self._free[column] = row, row + 1
        self._lowest[place] = max(row, self._lowest.get(before, row))
