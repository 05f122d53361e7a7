"""What the rules for programs look at, worked out once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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


class Move(NamedTuple):
    """A value that leaves a device, or arrives at one."""

    position: int
    buffer: Buffer


Moves = dict[tuple[int, int], list[Move]]
"""(from, to) → what moves, in the order of the list of the device that sends, or receives."""


Compute = Forward | Backward | Update | Barrier | Pause


class Facts:
    """A program and what follows from it.

    Attributes:
        program: the program.
        trains: whether anything runs backward.
    """

    def __init__(self, program: Program, malformed: set[Place]) -> None:
        self.program = program
        self.trains = any(
            isinstance(instruction, Backward)
            for instructions in program.lists
            for instruction in instructions
        )
        self._malformed = malformed

    @property
    def lists(self) -> Iterator[tuple[int, Iterable[tuple[int, Instruction]]]]:
        """Each device, and the positions and instructions of its list that are well-formed."""
        for device, instructions in enumerate(self.program.lists):
            steps = enumerate(instructions)
            if self._malformed:
                yield device, [step for step in steps if (device, step[0]) not in self._malformed]
            else:
                yield device, steps

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """A fault of the instruction at a place."""
        text = print_instruction(self.program.lists[device][position])
        return Fault(what, cure, device, position, text)

    @cached_property
    def compute(self) -> list[list[tuple[int, Compute]]]:
        """Device → position and instruction of all but the moves and frees, in order."""
        return [
            [(position, x) for position, x in steps if isinstance(x, Compute)]
            for _, steps in self.lists
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
        made: list[dict[Buffer, int]] = [{} for _ in self.program.lists]
        for device, steps in self.lists:
            for position, instruction in steps:
                for buffer in self.program.writes(instruction):
                    made[device].setdefault(buffer, position)
        return made

    @cached_property
    def sent(self) -> Moves:
        """What leaves, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, steps in self.lists:
            for position, instruction in steps:
                if isinstance(instruction, Send | Stash):
                    pair = device, self.program.destination(instruction)
                    moves[pair].append(Move(position, instruction.buffer))
        return moves

    @cached_property
    def received(self) -> Moves:
        """What arrives, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, steps in self.lists:
            for position, instruction in steps:
                if isinstance(instruction, Receive | Pop):
                    pair = self.program.origin(instruction), device
                    moves[pair].append(Move(position, instruction.buffer))
        return moves
