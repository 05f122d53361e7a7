"""What the rules for programs look at, worked out once."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.program import (
    Backward,
    Barrier,
    Buffer,
    Forward,
    Instruction,
    Pause,
    Pop,
    Program,
    Receive,
    Send,
    Stash,
    Update,
)
from fxpipe.text.instruction import print_instruction
from fxpipe.verify.waits import Place


class Step(NamedTuple):
    """A well-formed instruction and the buffers that it touches."""

    position: int
    instruction: Instruction
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    ends: tuple[Buffer, ...]


class Move(NamedTuple):
    """A value that leaves a device, or arrives at one."""

    position: int
    buffer: Buffer


Moves = dict[tuple[int, int], list[Move]]
"""(from, to) → what moves, in the order of the list of the device that sends, or receives."""


class Facts:
    """A program and what follows from it.

    Attributes:
        program: the program.
        steps: device → its well-formed instructions in order; the others are left out.
        trains: whether anything runs backward.
    """

    def __init__(self, program: Program, malformed: set[Place]) -> None:
        self.program = program
        self.steps = [
            [
                Step(
                    position,
                    instruction,
                    program.reads(instruction),
                    program.writes(instruction),
                    program.ends(instruction),
                )
                for position, instruction in enumerate(list_)
                if not malformed or (device, position) not in malformed
            ]
            for device, list_ in enumerate(program.lists)
        ]
        self.trains = any(
            type(instruction) is Backward for list_ in program.lists for instruction in list_
        )

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """A fault of the instruction at a place."""
        text = print_instruction(self.program.lists[device][position])
        return Fault(what, cure, device, position, text)

    @cached_property
    def compute(self) -> list[list[tuple[int, Forward | Backward | Update | Barrier | Pause]]]:
        """Device → position and instruction of all but the moves and frees, in order."""
        return [
            [
                (step.position, step.instruction)
                for step in steps
                if isinstance(step.instruction, Forward | Backward | Update | Barrier | Pause)
            ]
            for steps in self.steps
        ]

    @cached_property
    def meetings(self) -> list[list[tuple[int, Barrier | Pause]]]:
        """Device → position and instruction of its barriers and pauses, in order."""
        return [
            [(p, x) for p, x in compute if isinstance(x, Barrier | Pause)]
            for compute in self.compute
        ]

    @cached_property
    def first_made(self) -> list[dict[Buffer, int]]:
        """Device → buffer → the first position at which it is made there."""
        made: list[dict[Buffer, int]] = [{} for _ in self.steps]
        for device, steps in enumerate(self.steps):
            for step in steps:
                for buffer in step.writes:
                    made[device].setdefault(buffer, step.position)
        return made

    @cached_property
    def sent(self) -> Moves:
        """What leaves, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, steps in enumerate(self.steps):
            for position, instruction, *_ in steps:
                if isinstance(instruction, Send | Stash):
                    pair = device, self.program.destination(instruction)
                    moves[pair].append(Move(position, instruction.buffer))
        return moves

    @cached_property
    def received(self) -> Moves:
        """What arrives, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, steps in enumerate(self.steps):
            for position, instruction, *_ in steps:
                if isinstance(instruction, Receive | Pop):
                    pair = self.program.origin(instruction), device
                    moves[pair].append(Move(position, instruction.buffer))
        return moves
