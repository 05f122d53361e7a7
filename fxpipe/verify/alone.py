"""Each instruction of a program by itself: as a task of the step, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.value import (
    BETWEEN,
    COPIED,
    HOST,
    Buffer,
    norm_buffer,
)
from fxpipe.ir.walk import Place
from fxpipe.text.program import print_instruction
from fxpipe.verify.tasks import Window, wrong_batch


def window_of(program: Program) -> Window:
    """Write the compute instructions of a program as tasks of a schedule."""
    kinds = [x.stands_for for x in opcodes_of(program) if x.stands_for]
    standing = {kind.letter: kind for kind in kinds}
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


def opcodes_of(program: Program) -> list[type[ins.Instruction]]:
    """The classes of its instructions, and of those that it may lack."""
    classes = dict.fromkeys(type(x) for x in chain(*program.lists))
    lacking = ins.every_opcode() if program.replicas > 1 or program.copies else ins.OPCODES
    return [*(classes | dict.fromkeys(lacking.values()))]


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


def wrong_alone(program: Program) -> Iterator[tuple[Place, ins.Wrong]]:
    """Yield each instruction that is wrong by itself; ``Window.wrong`` has those wrong as tasks."""
    carried = _carried(program)
    for device, instructions in enumerate(program.lists):
        for position, x in enumerate(instructions):
            if isinstance(x, ins.Move):
                wrong = _misrouted(x, program, device, carried)
            else:
                wrong = x.wrong(program, device)
                if wrong is None and _task(x) is None and not isinstance(x, ins.Meeting):
                    wrong = _misplaced(x, program, device)
            if wrong is not None:
                yield Place(device, position), wrong


def _misplaced(x: ins.Instruction, program: Program, device: int) -> ins.Wrong | None:
    """What is wrong with the stage, the batch or the micro-batch of what is no task."""
    if not 0 <= x.stage < program.stages:
        return f"there is no stage {x.stage}", f"name one of the {program.stages}, from 0"
    if program.placement[x.stage] != device:
        return f"stage {x.stage} is on device {program.placement[x.stage]}", "move it there"
    return wrong_batch(x.batch, getattr(x, "microbatch", None) or 0, program.microbatches)


def _carried(program: Program) -> set[tuple[object, ...]]:
    """All buffers of the program that go from one stage to another, without their
    micro-batches."""
    carried: set[tuple[object, ...]] = set()
    for edge in (*program.edges, *program.gradients):
        carried.add(edge.buffer(0)[:4])
    for stage in range(program.stages):
        carried.update([norm_buffer(stage, other)[:4] for other in range(program.stages)])
    return carried


def _own(program: Program, buffer: Buffer) -> bool:
    """Whether it is a buffer of one of the program's stages."""
    kind, value, source, target = buffer[:4]
    own = kind not in BETWEEN and not value and source == target
    return own and 0 <= source < program.stages


def _misrouted(
    x: ins.Move, program: Program, device: int, carried: Container[tuple[object, ...]]
) -> ins.Wrong | None:
    """What is wrong with a move or a free."""
    buffer, i = x.buffer, x.buffer.microbatch
    exists = buffer[:4] in carried or _own(program, buffer)
    if buffer.kind in COPIED:  # with the copy's device for a micro-batch
        exists, i = exists and i in program.copies_of(buffer.source), 0
    if not exists:
        return "no edge carries this value", "name a buffer of one of the program's edges"
    made, used = program.ends_of(buffer)
    if cure := x.route(device, made, used):
        return f"the value goes from {_device_name(made)} to {_device_name(used)}", cure
    return wrong_batch(buffer.batch, i, program.microbatches)


def _device_name(device: int) -> str:
    return "the caller" if device == HOST else f"device {device}"
