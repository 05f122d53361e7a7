"""The rows of a program's picture: a device, or each stream of a device that has several."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.draw.program_timeline import instruction_time, needs_of
from fxpipe.draw.walk import Place, Walked, walk_rows
from fxpipe.ir.program import COMPUTE, Barrier, Event, Instruction, Pause, Program


@dataclass(frozen=True)
class Lane:
    """One row.

    Attributes:
        device: the device.
        stream: its stream, or nothing where it does one instruction after another.
        positions: where its instructions stand in the device's list.
    """

    device: int
    stream: str
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Lanes:
    """All rows of a program's picture.

    Attributes:
        rows: from above.
        at: device and position in its list → row and position in it.
        waits: place in the rows → the places of those whose events it waits for.
    """

    rows: tuple[Lane, ...]
    at: dict[Place, Place]
    waits: dict[Place, list[Place]]


def lanes_of(program: Program) -> Lanes:
    """The rows: of each device its computing stream first, then the others by name."""
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
        (lane.device, position): (row, index)
        for row, lane in enumerate(rows)
        for index, position in enumerate(lane.positions)
    }
    return Lanes(tuple(rows), at, _waits(program, at))


def _waits(program: Program, at: dict[Place, Place]) -> dict[Place, list[Place]]:
    recorded: dict[Event, Place] = {}
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            if launch.record is not None:
                recorded[launch.record] = at[device, position]
    # What an earlier step recorded is there already.
    return {
        at[device, position]: [recorded[event] for event in launch.waits if event in recorded]
        for device, launches in enumerate(program.launches)
        for position, launch in enumerate(launches)
        if launch.waits
    }


def walk_lanes(program: Program, lanes: Lanes, mark: float) -> Walked[Instruction]:
    """Run a program on paper, valid or not; its spans name the row and the position in it.

    Args:
        program: what to run.
        lanes: its rows.
        mark: the time of an instruction that computes nothing.
    """
    needs = needs_of(program)
    rows = [[program.lists[lane.device][at] for at in lane.positions] for lane in lanes.rows]
    needed: list[list[list[Place]]] = []
    for row, lane in enumerate(lanes.rows):
        own: list[list[Place]] = []
        for index, position in enumerate(lane.positions):
            meets = isinstance(program.lists[lane.device][position], Barrier | Pause)
            found = needs[lane.device][position] if meets or not program.launches else []
            own.append([lanes.at.get(place, place) for place in found])
            own[-1] += lanes.waits.get((row, index), [])
        needed.append(own)
    return walk_rows(rows, lambda instruction: instruction_time(instruction, mark), needed)
