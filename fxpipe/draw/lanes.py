"""The rows of a program's picture: a device, or each stream of a device that has several."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.draw.timeline import Timeline, sketch
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import COMPUTE, Event, Program
from fxpipe.ir.walk import Place, Wait, usual_cost, waits_of


@dataclass(frozen=True)
class Lane:
    """One row.

    Attributes:
        device: the device.
        stream: the stream, or "" where the device runs one instruction after another.
        positions: the indices of the row's instructions in the device's list.
    """

    device: int
    stream: str
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Lanes:
    """All rows of a program's picture.

    Attributes:
        rows: the rows from top to bottom.
        at: (device, position in its list) → (row, position in the row).
        waits: place in the rows → the places of the instructions whose events it waits for.
    """

    rows: tuple[Lane, ...]
    at: dict[Place, Place]
    waits: dict[Place, list[Place]]


def lanes_of(program: Program) -> Lanes:
    """The rows: for each device its compute stream first, then the others by name."""
    rows: list[Lane] = []
    for device, own in enumerate(program.lists):
        if not program.launches:
            rows.append(Lane(device, "", tuple(range(len(own)))))
            continue
        streams = [launch.stream for launch in program.launches[device]]
        for stream in sorted({COMPUTE, *streams}, key=lambda name: (name != COMPUTE, name)):
            positions = tuple(at for at, name in enumerate(streams) if name == stream)
            rows.append(Lane(device, stream, positions))
    at = {
        Place(lane.device, position): Place(row, index)
        for row, lane in enumerate(rows)
        for index, position in enumerate(lane.positions)
    }
    return Lanes(tuple(rows), at, _waits(program, at))


def _waits(program: Program, at: dict[Place, Place]) -> dict[Place, list[Place]]:
    recorded: dict[Event, Place] = {}
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            if launch.record is not None:
                recorded[launch.record] = at[Place(device, position)]
    # Events of earlier steps are recorded already.
    return {
        at[Place(device, position)]: [
            recorded[event] for event in launch.waits if event in recorded
        ]
        for device, launches in enumerate(program.launches)
        for position, launch in enumerate(launches)
        if launch.waits
    }


def sketch_lanes(program: Program, lanes: Lanes, mark: float) -> Timeline[ins.Instruction]:
    """Work out when the instructions of a program run, even of one that is not valid.

    Args:
        program: the program.
        lanes: its rows. On streams a receive waits for events and not for the send, which only
            passes a reference on.
        mark: the time of an instruction that computes nothing.

    Returns:
        The timeline, whose spans have the row and the position in the row.
    """
    rows = [[program.lists[lane.device][at] for at in lane.positions] for lane in lanes.rows]
    waits: list[list[Wait]] = [[] for _ in rows]
    for device, own in enumerate(waits_of(program)):
        for position, *on in own:
            x = program.lists[device][position]
            if not program.launches or isinstance(x, ins.Barrier | ins.Pause):
                row, index = lanes.at[Place(device, position)]
                waits[row].append((index, *lanes.at[Place(*on)]))
    for (row, index), sources in lanes.waits.items():
        waits[row] += [(index, *source) for source in sources]
    for own in waits:
        own.sort()
    return sketch(rows, lambda x: mark if ins.letter_of(x) is None else usual_cost(x), waits)
