"""Facts that the rules for programs share, and checks of each instruction by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task, TaskKind
from fxpipe.ir.unroll import shifted
from fxpipe.ir.value import (
    COPIED,
    HOST,
    KEPT,
    Buffer,
    forward_buffer,
    gradient_buffer,
    norm_buffer,
)
from fxpipe.ir.walk import Place
from fxpipe.text.program import print_instruction
from fxpipe.verify.copies import Wrong
from fxpipe.verify.tasks import Spot, Window, wrong_batch

_KINDS: dict[type[ins.Instruction], TaskKind] = {
    ins.AllGather: TaskKind("gather", "all_gather", per_microbatch=False, follows="A"),
    ins.TakePart: TaskKind("part", "take_part", per_microbatch=False, follows="A"),
    ins.GatherWeights: TaskKind("weights", "gather_weights", per_microbatch=False, follows="U"),
    ins.Share: TaskKind("share", "share", per_microbatch=False),
    ins.Add: TaskKind("add", "add", per_microbatch=False),
    ins.Norm: TaskKind("norm", "norm", per_microbatch=False),
}
"""Instructions that are no task of a schedule → the kind of task that stands for them here."""

_MOVED: dict[type[ins.Instruction], str] = {ins.Offload: "O", ins.Prefetch: "P"}


class Move(NamedTuple):
    """A send or a receive of a value: its position, the buffer, and its batch there."""

    position: int
    buffer: Buffer
    batch: int


Moves = dict[tuple[int, int], list[Move]]
"""(from, to) → the sends, or the receives, between two devices in the order of their list."""

Step = (
    ins.Computing
    | ins.Run
    | ins.Summing
    | ins.Copying
    | ins.Norm
    | ins.Clip
    | ins.Update
    | ins.Barrier
    | ins.Pause
)
"""Instructions that neither move nor free a value."""


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
        self.window = _window(program)
        wrong = {**self.window.wrong, **dict(_wrong(program))}
        self.wrong = {place: wrong[place] for place in sorted(wrong)}
        self.lives = [self._life(device) for device in range(program.devices)]

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """Make a fault of the instruction at a place."""
        text = print_instruction(self.program.lists[device][position])
        return Fault(what, cure, device, position, text)

    def moment(self, device: int, position: int) -> tuple[int, int]:
        """When a batch runs an instruction: in which of its steps, from 0, and at which place."""
        return -ins.batch_of(self.program.lists[device][position]), position

    @cached_property
    def compute(self) -> list[list[tuple[int, Step]]]:
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
            {buffer: position for position, x in life for buffer in self.program.writes(x)}
            for life in self.lives
        ]

    @cached_property
    def sent(self) -> Moves:
        """The sends and stashes, by pair of devices."""
        return self._moves(ins.Send, ins.Stash)

    @cached_property
    def received(self) -> Moves:
        """The receives and pops, by pair of devices."""
        return self._moves(ins.Receive, ins.Pop)

    def _moves(self, *kinds: type[ins.Moving]) -> Moves:
        """The moves by instructions of some types, by pair of devices, in the order of the list."""
        program = self.program
        moves: Moves = defaultdict(list)
        for device, life in enumerate(self.lives):
            for position in sorted(p for p, x in life if isinstance(x, kinds)):
                x = program.lists[device][position]
                assert isinstance(x, ins.Move)
                moves[program.ends_of(x.buffer)].append(
                    Move(position, x.buffer._replace(batch=0), x.buffer.batch)
                )
        return moves

    def _life(self, device: int) -> list[tuple[int, ins.Instruction]]:
        life = list(enumerate(self.program.lists[device]))
        if self.wrong:
            life = [(p, x) for p, x in life if (device, p) not in self.wrong]
        if not self.program.depth:
            return life
        life.sort(key=lambda entry: -ins.batch_of(entry[1]))
        return [(p, shifted(x, -ins.batch_of(x))) for p, x in life]


def _window(program: Program) -> Window:
    """Write the compute instructions of a program as tasks of a schedule."""
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
        ),
        {**KINDS, **{kind.letter: kind for kind in _KINDS.values()}},
        positions,
        lambda device, position: print_instruction(program.lists[device][position]),
    )


def _task(x: ins.Instruction) -> Task | None:
    if isinstance(x, ins.Move):
        letter = _MOVED.get(type(x))
        buffer = x.buffer
        return Task(letter, buffer.microbatch, buffer.source, buffer.batch) if letter else None
    if isinstance(x, ins.Meeting | ins.PartialBackward):
        return None
    kind = _KINDS.get(type(x))
    letter = kind.letter if kind else ins.letter_of(x)
    assert letter is not None
    return Task(letter, getattr(x, "microbatch", None), x.stage, x.batch)


def _wrong(program: Program) -> Iterator[tuple[Place, Wrong]]:
    """Yield each instruction that is wrong by itself; ``Window.wrong`` has those wrong as tasks."""
    carried = _carried(program)
    # most buffers differ in the micro-batch alone, so the verdict on the rest is remembered
    verdicts: dict[tuple[object, ...], Wrong | None] = {}
    for device, instructions in enumerate(program.lists):
        for position, x in enumerate(instructions):
            wrong: Wrong | None = None
            if isinstance(x, ins.Move):
                buffer, i = x.buffer, x.buffer.microbatch
                key = device, type(x), buffer[:4], i if program.copies else 0
                if key not in verdicts:
                    exists = buffer[:4] in carried
                    if buffer.kind in COPIED:
                        exists = exists and i in program.copies_of(buffer.source)
                    route = program.ends_of(buffer) if exists else None
                    verdicts[key] = _misrouted(x, device, route)
                number = 0 if buffer.kind in COPIED else i
                wrong = verdicts[key] or wrong_batch(buffer.batch, number, program.microbatches)
            elif isinstance(x, ins.PartialBackward):
                wrong = _wrong_part(program, device, x)
            elif isinstance(x, ins.Run) and (x.kind not in KINDS or KINDS[x.kind].run is None):
                wrong = f"there is no task of your own {x.kind!r}", "define it with define_task"
            elif isinstance(x, ins.Summing) and program.replicas == 1:
                wrong = _ONE_REPLICA
            elif isinstance(x, ins.Give) and not device == x.copy in program.copies_of(x.stage):
                wrong = f"device {device} has no such copy of stage {x.stage}", "remove it"
            elif isinstance(x, ins.Share | ins.Add) and not program.copies_of(x.stage):
                wrong = f"stage {x.stage} has no copies", "remove it, or give it some"
            if wrong is not None:
                yield Place(device, position), wrong


_ONE_REPLICA = "the program has one replica", "remove it, or give the number of replicas"


def _wrong_part(program: Program, device: int, x: ins.PartialBackward) -> Wrong | None:
    """What is wrong with a part of a backward, apart from its position."""
    if program.replicas == 1:
        return _ONE_REPLICA
    if x.kind not in ("B", "W"):
        return f"there is no backward {x.kind!r}", "write B for a whole one, W for its second half"
    if not 0 <= x.stage < program.stages or program.placement[x.stage] != device:
        return f"stage {x.stage} is not on device {device}", "name one that is"
    number = -1 if x.microbatch is None else x.microbatch
    return wrong_batch(x.batch, number, program.microbatches)


def _carried(program: Program) -> set[tuple[object, ...]]:
    """All buffers that the program can have, without their micro-batches."""
    carried: set[tuple[object, ...]] = set()
    for edge in program.edges:
        carried.add(forward_buffer(edge, 0)[:4])
        if edge.gradient:
            carried.add(gradient_buffer(edge, 0)[:4])
    for stage in range(program.stages):
        carried.update([norm_buffer(stage, other)[:4] for other in range(program.stages)])
        carried.update([(kind, "", stage, stage) for kind in (*KEPT, *COPIED)])
    return carried


def _misrouted(instruction: ins.Moving, device: int, route: tuple[int, int] | None) -> Wrong | None:
    """What is wrong with a move or a free, apart from its micro-batch."""
    if route is None:
        return "no edge carries this value", "name a buffer of one of the program's edges"
    made, used = route
    skips = instruction.buffer.kind == "skip"
    match instruction:
        case ins.Free():
            right = device in route
            cure = "free it on a device that holds it"
        case ins.Offload() | ins.Prefetch() | ins.Await():
            kind = _MADE[type(instruction)]
            right, cure = device == made and instruction.buffer.kind == kind, f"let it make {kind}"
        case ins.Load():
            right = made == HOST and used == device
            cure = "load what the caller gives, on the device that uses it"
        case ins.Output():
            right = used == HOST and made == device
            cure = "hand over what goes to the caller, on the device that makes it"
        case ins.Send() | ins.Stash():
            right = made == device != used and used != HOST
            right = right and skips == isinstance(instruction, ins.Stash)
            cure = (
                "send what another device uses, on the device that makes it; what skips "
                "stages is stashed, all else is sent"
            )
        case ins.Receive() | ins.Pop():
            right = used == device != made and made != HOST
            right = right and skips == isinstance(instruction, ins.Pop)
            cure = (
                "receive what another device makes, on the device that uses it; what was "
                "stashed is popped, all else is received"
            )
    if right:
        return None
    return f"the value goes from {_device_name(made)} to {_device_name(used)}", cure


_MADE: dict[type[ins.Offloading], str] = {
    ins.Offload: "offloaded",
    ins.Prefetch: "fetching",
    ins.Await: "fetched",
}


def _device_name(device: int) -> str:
    return "the caller" if device == HOST else f"device {device}"
