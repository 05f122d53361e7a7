"""Facts that the rules for programs share, and checks of each instruction by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.value import (
    BETWEEN,
    COPIED,
    HOST,
    Buffer,
    forward_buffer,
    gradient_buffer,
    norm_buffer,
)
from fxpipe.ir.walk import Place
from fxpipe.text.program import print_instruction
from fxpipe.verify.tasks import Spot, Window, wrong_batch


class Transit(NamedTuple):
    """A send or a receive of a value: its position, the buffer, and its batch there."""

    position: int
    buffer: Buffer
    batch: int


Moves = dict[tuple[int, int], list[Transit]]
"""(from, to) → the sends, or the receives, between two devices in the order of their list."""


class Facts:
    """A program and the facts about it that the rules use.

    Where batches overlap, a program is a window that repeats. The rules look at the life of one
    batch instead: the instructions of a device that are for it, in the order of (−batch, position).
    No other instruction touches its values. The first steps and the flush leave out whole batches,
    so a batch that exists runs all of its instructions. Batches and versions in a life are relative
    to it: its instructions have batch 0, and read version 0 if all earlier batches are applied.

    Attributes:
        program: the program.
        window: its compute instructions, as tasks.
        wrong: place → what is wrong with the instruction by itself; the rules leave these out.
        lives: device → position and instruction of all others, in the order of a batch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.window = window_of(program)
        wrong = {**self.window.wrong, **dict(_wrong(program))}
        self.wrong = {place: wrong[place] for place in sorted(wrong)}
        self.lives = [self._life(device) for device in range(program.devices)]

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """Make a fault of the instruction at a place."""
        text = print_instruction(self.program.lists[device][position])
        return Fault(what, cure, device, position, text)

    def moment(self, device: int, position: int) -> tuple[int, int]:
        """When a batch runs an instruction: in which of its steps, from 0, and at which place."""
        return -self.program.lists[device][position].batch, position

    @cached_property
    def compute(self) -> list[list[tuple[int, ins.Instruction]]]:
        """Device → its life without moves and frees."""
        return [
            [(position, x) for position, x in life if not isinstance(x, ins.Move)]
            for life in self.lives
        ]

    @cached_property
    def meetings(self) -> list[list[tuple[int, ins.Barrier | ins.Pause]]]:
        """Device → position and instruction of its barriers and pauses."""
        return [
            [(p, x) for p, x in compute if isinstance(x, ins.Meeting)] for compute in self.compute
        ]

    @cached_property
    def updates(self) -> dict[int, Spot]:
        """Stage → the spot of its update."""
        spots = self.window.spots
        return {stage: spot for (kind, _, stage), spot in spots.items() if kind == "U"}

    @cached_property
    def whole(self) -> dict[int, Spot]:
        """Stage → the spot after which a new version is complete: its update, or gather_weights."""
        spots = self.window.spots
        gathered = {stage: spot for (kind, _, stage), spot in spots.items() if kind == "weights"}
        return {**self.updates, **gathered}

    @cached_property
    def last_made(self) -> list[dict[Buffer, int]]:
        """Device → buffer → the last position that makes it there."""
        return [
            {buffer: position for position, x in life for buffer in x.makes(self.program)}
            for life in self.lives
        ]

    @cached_property
    def sent(self) -> Moves:
        """The sends, by pair of devices."""
        return self._moves(ins.Send)

    @cached_property
    def received(self) -> Moves:
        """The receives, by pair of devices."""
        return self._moves(ins.Receive)

    def _moves(self, kind: type[ins.Move]) -> Moves:
        """The moves by instructions of a type, by pair of devices, in the order of the list."""
        program = self.program
        moves: Moves = defaultdict(list)
        for device, life in enumerate(self.lives):
            for position in sorted(p for p, x in life if isinstance(x, kind)):
                x = program.lists[device][position]
                assert isinstance(x, ins.Move)
                moves[program.ends_of(x.buffer)].append(
                    Transit(position, x.buffer._replace(batch=0), x.buffer.batch)
                )
        return moves

    def _life(self, device: int) -> list[tuple[int, ins.Instruction]]:
        life = list(enumerate(self.program.lists[device]))
        if self.wrong:
            life = [(p, x) for p, x in life if (device, p) not in self.wrong]
        if not self.program.depth:
            return life
        life.sort(key=lambda entry: -entry[1].batch)
        return [(p, x.later(-x.batch) if x.batch else x) for p, x in life]


def window_of(program: Program) -> Window:
    """Write the compute instructions of a program as tasks of a schedule."""
    kinds: dict[type[ins.Instruction], None] = {type(x): None for x in chain(*program.lists)}
    # what is missing is of these, too: with replicas or copies of extensions
    missing = ins.every_opcode() if program.replicas > 1 or program.copies else ins.OPCODES
    kinds |= dict.fromkeys(missing.values())
    standing = {x.stands_for.letter: x.stands_for for x in kinds if x.stands_for}
    rows: list[tuple[Task, ...]] = []
    positions: list[list[int]] = []
    for instructions in program.lists:
        tasks = [(at, task) for at, x in enumerate(instructions) if (task := _task(x)) is not None]
        positions.append([at for at, _ in tasks])
        rows.append(tuple([task for _, task in tasks]))
    return Window(
        Schedule(
            program.name,
            program.microbatches,
            program.placement,
            tuple(rows),
            copies=program.copies,
            frozen=frozenset(
                (x.microbatch, x.stage)
                for x in chain(*program.lists)
                if isinstance(x, ins.InputGrad) and x.frozen
            ),
        ),
        {**KINDS, **standing},
        positions,
        lambda device, position: print_instruction(program.lists[device][position]),
    )


def _task(x: ins.Instruction) -> Task | None:
    if x.partial:
        return None
    if isinstance(x, ins.Move):
        buffer = x.buffer
        kind = x.stands_for
        return Task(kind.letter, buffer.microbatch, buffer.source, buffer.batch) if kind else None
    letter = x.stands_for.letter if x.stands_for else x.letter
    if letter is None:
        return None
    return Task(letter, getattr(x, "microbatch", None), getattr(x, "stage", None), x.batch)


def _wrong(program: Program) -> Iterator[tuple[Place, ins.Wrong]]:
    """Yield each instruction that is wrong by itself; ``Window.wrong`` has those wrong as tasks."""
    carried = _carried(program)
    # most buffers differ in the micro-batch alone, so the verdict on the rest is remembered
    verdicts: dict[tuple[object, ...], ins.Wrong | None] = {}
    for device, instructions in enumerate(program.lists):
        for position, x in enumerate(instructions):
            wrong: ins.Wrong | None = None
            if isinstance(x, ins.Move):
                buffer, i = x.buffer, x.buffer.microbatch
                key = device, type(x), buffer[:4], i if program.copies else 0
                if key not in verdicts:
                    exists = buffer[:4] in carried or _own(program, buffer)
                    if buffer.kind in COPIED:
                        exists = exists and i in program.copies_of(buffer.source)
                    route = program.ends_of(buffer) if exists else None
                    verdicts[key] = _misrouted(x, device, route)
                number = 0 if buffer.kind in COPIED else i
                wrong = verdicts[key] or wrong_batch(buffer.batch, number, program.microbatches)
            else:
                wrong = x.wrong(program, device)
                if wrong is None and x.partial and isinstance(x, ins.Compute):  # it is no task
                    wrong = wrong_batch(x.batch, x.microbatch, program.microbatches)
            if wrong is not None:
                yield Place(device, position), wrong


def _carried(program: Program) -> set[tuple[object, ...]]:
    """All buffers of the program that go from one stage to another, without their
    micro-batches."""
    carried: set[tuple[object, ...]] = set()
    for edge in program.edges:
        carried.add(forward_buffer(edge, 0)[:4])
        if edge.gradient:
            carried.add(gradient_buffer(edge, 0)[:4])
    for stage in range(program.stages):
        carried.update([norm_buffer(stage, other)[:4] for other in range(program.stages)])
    return carried


def _own(program: Program, buffer: Buffer) -> bool:
    """Whether it is a buffer of one of the program's stages."""
    kind, value, source, target = buffer[:4]
    own = kind not in BETWEEN and not value and source == target
    return own and 0 <= source < program.stages


def _misrouted(x: ins.Move, device: int, route: tuple[int, int] | None) -> ins.Wrong | None:
    """What is wrong with a move or a free, apart from its micro-batch."""
    if route is None:
        return "no edge carries this value", "name a buffer of one of the program's edges"
    cure = x.route(device, *route)
    made, used = map(_device_name, route)
    return (f"the value goes from {made} to {used}", cure) if cure else None


def _device_name(device: int) -> str:
    return "the caller" if device == HOST else f"device {device}"
