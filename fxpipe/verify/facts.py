"""What the rules for programs look at, worked out once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.unroll import shifted
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place
from fxpipe.text.instruction import print_instruction


class Move(NamedTuple):
    """A value that leaves a device, or arrives at one: where, which, and for which batch there."""

    position: int
    buffer: Buffer
    batch: int


Moves = dict[tuple[int, int], list[Move]]
"""(from, to) → what moves, in the order of the list of the device that sends, or receives."""


Step = (
    ins.Forward
    | ins.Recompute
    | ins.Backward
    | ins.InputGrad
    | ins.WeightGrad
    | ins.Run
    | ins.Norm
    | ins.Clip
    | ins.Update
    | ins.Barrier
    | ins.Pause
)
"""All that does not move or free a value."""


class Life(NamedTuple):
    """Positions in a device's list and their instructions, as a batch meets them."""

    positions: Sequence[int]
    instructions: Sequence[ins.Instruction]

    @property
    def steps(self) -> Iterator[tuple[int, ins.Instruction]]:
        return zip(self.positions, self.instructions, strict=True)


class Facts:
    """A program and what follows from it.

    Where batches overlap, a program is a window that repeats. The rules look at the life of one
    batch instead: it meets the instructions of a device in the order of (−batch, position), and
    in each step nothing else that could touch its values. The first steps and the flush leave
    out whole batches, so that a batch that exists meets all of its instructions. Batches and
    versions in a life count from its own: its instructions have batch 0, and read version 0
    where the batches before it have all been applied.

    Attributes:
        program: the program.
        trains: whether anything runs backward.
        lives: device → all that is well-formed, as a batch meets it.
    """

    def __init__(self, program: Program, malformed: set[Place]) -> None:
        self.program = program
        self.trains = any(
            isinstance(instruction, ins.Backward | ins.InputGrad)
            for instructions in program.lists
            for instruction in instructions
        )
        self._malformed = malformed
        self.lives = [self._life(device) for device in range(program.devices)]

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """A fault of the instruction at a place."""
        text = print_instruction(self.program.lists[device][position])
        return Fault(what, cure, device, position, text)

    def batch(self, device: int, position: int) -> int:
        """The batch for which an instruction runs in a window: 0 for its own step's."""
        return ins.batch_of(self.program.lists[device][position]) if self.program.depth else 0

    def moment(self, device: int, position: int) -> tuple[int, int]:
        """When a batch meets an instruction, among those of its device: step and position."""
        return -self.batch(device, position), position

    @cached_property
    def compute(self) -> list[list[tuple[int, Step]]]:
        """Device → position and instruction of all but the moves and frees, in a life's order."""
        return [
            [(position, x) for position, x in life.steps if isinstance(x, Step)]
            for life in self.lives
        ]

    @cached_property
    def meetings(self) -> list[list[tuple[int, ins.Barrier | ins.Pause]]]:
        """Device → position and instruction of its barriers and pauses, in order."""
        return [
            [(p, x) for p, x in compute if isinstance(x, ins.Barrier | ins.Pause)]
            for compute in self.compute
        ]

    @cached_property
    def updates(self) -> dict[int, tuple[int, int]]:
        """Stage → device and position of its first update."""
        found: dict[int, tuple[int, int]] = {}
        for device, compute in enumerate(self.compute):
            for position, x in compute:
                if isinstance(x, ins.Update):
                    found.setdefault(x.stage, (device, position))
        return found

    @cached_property
    def recomputed(self) -> set[tuple[int, int]]:
        """Stage and micro-batch of each forward that runs again."""
        return {
            (x.stage, x.microbatch)
            for compute in self.compute
            for _, x in compute
            if isinstance(x, ins.Recompute)
        }

    @cached_property
    def last_made(self) -> list[dict[Buffer, int]]:
        """Device → buffer → the last position at which it is made there."""
        return [
            {buffer: position for position, x in life.steps for buffer in self.program.writes(x)}
            for life in self.lives
        ]

    @cached_property
    def sent(self) -> Moves:
        """What leaves, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, position, x in self._moves(ins.Send, ins.Stash):
            assert isinstance(x, ins.Send | ins.Stash)
            move = Move(position, x.buffer, self.batch(device, position))
            moves[device, self.program.destination(x)].append(move)
        return moves

    @cached_property
    def received(self) -> Moves:
        """What arrives, by pair of devices."""
        moves: Moves = defaultdict(list)
        for device, position, x in self._moves(ins.Receive, ins.Pop):
            assert isinstance(x, ins.Receive | ins.Pop)
            move = Move(position, x.buffer, self.batch(device, position))
            moves[self.program.origin(x), device].append(move)
        return moves

    def _moves(self, *kinds: type[ins.Instruction]) -> Iterable[tuple[int, int, ins.Instruction]]:
        """Device, position and instruction of these kinds, in the order of the lists."""
        for device, life in enumerate(self.lives):
            found = [(position, x) for position, x in life.steps if isinstance(x, kinds)]
            if self.program.depth:
                found.sort(key=lambda entry: entry[0])
            for position, x in found:
                yield device, position, x

    def _life(self, device: int) -> Life:
        own = self.program.lists[device]
        positions: Sequence[int] = range(len(own))
        if self._malformed:
            positions = [p for p in positions if (device, p) not in self._malformed]
        elif not self.program.depth:
            return Life(positions, own)
        positions = sorted(positions, key=lambda p: -ins.batch_of(own[p]))
        return Life(positions, [shifted(own[p], -ins.batch_of(own[p])) for p in positions])
