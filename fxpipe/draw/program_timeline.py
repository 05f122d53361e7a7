"""When the instructions of a program run, if each takes its time and transfers take none."""

from __future__ import annotations

from typing import assert_never

from fxpipe.draw.timeline import TIMES
from fxpipe.draw.walk import NOWHERE, Place, Walked, walk_rows
from fxpipe.program import (
    Backward,
    Barrier,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    Output,
    Pause,
    Pop,
    Program,
    Receive,
    Send,
    Stash,
    Update,
)


def walk_program(program: Program, mark: float = 0.0) -> Walked[Instruction]:
    """Run a program on paper, valid or not.

    A receive or a pop waits for its send or stash, a barrier or a pause for all devices.

    Args:
        program: what to run.
        mark: the time of an instruction that computes nothing.
    """
    return walk_rows(program.lists, lambda instruction: _time(instruction, mark), _needs(program))


def _time(instruction: Instruction, mark: float) -> float:
    match instruction:
        case Forward():
            return TIMES["F"]
        case Backward():
            return TIMES["B"]
        case Update():
            return TIMES["U"]
        case Load() | Output() | Send() | Receive() | Stash() | Pop() | Free():
            return mark
        case Barrier() | Pause():
            return mark
        case _:
            assert_never(instruction)


def _needs(program: Program) -> list[list[list[Place]]]:
    """Device → for each of its instructions, the places of those that it waits for."""
    sent: dict[Buffer, Place] = {}
    meetings: dict[type[Instruction], list[list[Place]]] = {Barrier: [], Pause: []}
    for device, instructions in enumerate(program.lists):
        for met in meetings.values():
            met.append([])
        for position, instruction in enumerate(instructions):
            match instruction:
                case Send(buffer) | Stash(buffer):
                    sent.setdefault(buffer, (device, position))
                case Barrier() | Pause():
                    meetings[type(instruction)][device].append((device, position))

    needs: list[list[list[Place]]] = []
    for instructions in program.lists:
        count = {Barrier: 0, Pause: 0}
        row: list[list[Place]] = []
        for instruction in instructions:
            match instruction:
                case Receive(buffer) | Pop(buffer):
                    row.append([sent.get(buffer, NOWHERE)])
                case Barrier() | Pause():
                    kind = type(instruction)
                    row.append(_gathering(meetings[kind], count[kind]))
                    count[kind] += 1
                case _:
                    row.append([])
        needs.append(row)
    return needs


def _gathering(met: list[list[Place]], number: int) -> list[Place]:
    """What all devices do right before their ``number``-th meeting."""
    arrivals = []
    for places in met:
        if number >= len(places):
            return [NOWHERE]
        device, position = places[number]
        if position > 0:
            arrivals.append((device, position - 1))
    return arrivals
