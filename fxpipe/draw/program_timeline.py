"""What the instructions of a program wait for, and how long they take in its picture."""

from __future__ import annotations

from typing import assert_never

from fxpipe.draw.walk import NOWHERE, Place
from fxpipe.ir.program import (
    Backward,
    Barrier,
    Buffer,
    Clip,
    Forward,
    Free,
    InputGrad,
    Instruction,
    Load,
    Norm,
    Output,
    Pause,
    Pop,
    Program,
    Receive,
    Recompute,
    Run,
    Send,
    Stash,
    Update,
    WeightGrad,
)
from fxpipe.ir.task import KINDS


def instruction_time(instruction: Instruction, mark: float) -> float:
    """The time of an instruction; ``mark`` of one that computes nothing."""
    match instruction:
        case Forward():
            return KINDS["F"].cost
        case Recompute():
            return KINDS["R"].cost
        case Backward():
            return KINDS["B"].cost
        case InputGrad():
            return KINDS["I"].cost
        case WeightGrad():
            return KINDS["W"].cost
        case Update():
            return KINDS["U"].cost
        case Clip():
            return KINDS["C"].cost
        case Norm():
            return mark
        case Run(kind):
            return KINDS[kind].cost if kind in KINDS else 1.0
        case Load() | Output() | Send() | Receive() | Stash() | Pop() | Free():
            return mark
        case Barrier() | Pause():
            return mark
        case _:
            assert_never(instruction)


def needs_of(program: Program) -> list[list[list[Place]]]:
    """Device → for each of its instructions, the places of those that it waits for.

    A receive or a pop waits for its send or stash, a barrier or a pause for all devices.
    """
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
