"""Single edits of schedules and programs: the raw material of the tests of their verifiers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any, TypeVar

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

Item = TypeVar("Item")
Lists = tuple[tuple[Item, ...], ...]

DISTANCES = (-5, -3, -2, 2, 3, 5)
"""How far an item is moved in its list; a swap is a move by one."""


def edits(lists: Lists[Item]) -> Iterator[tuple[str, Item, Lists[Item]]]:
    """Each item dropped, duplicated, swapped with the one before, moved, given to another."""
    for device, own in enumerate(lists):
        for at, item in enumerate(own):
            rest = (*own[:at], *own[at + 1 :])
            changed = {
                "drop": [rest],
                "duplicate": [(*own[:at], item, *own[at:]), (*own, item)],
                "swap": [(*rest[: at - 1], item, *rest[at - 1 :])] if at > 0 else [],
                "move": [
                    (*rest[: at + by], item, *rest[at + by :])
                    for by in DISTANCES
                    if 0 <= at + by <= len(rest)
                ],
            }
            for edit, results in changed.items():
                for result in results:
                    yield edit, item, (*lists[:device], result, *lists[device + 1 :])
            for other, theirs in enumerate(lists):
                if other != device:
                    moved = list(lists)
                    moved[device], moved[other] = rest, (*theirs[:at], item, *theirs[at:])
                    yield "give away", item, tuple(moved)


Mutant = TypeVar("Mutant", Schedule, Program)


def sampled(
    mutants: Iterable[tuple[str, str, Mutant]], each: int | None
) -> list[tuple[str, str, Mutant]]:
    """At most so many of each edit of each kind, spread over all of them; all where None."""
    classes: dict[tuple[str, str], list[tuple[str, str, Mutant]]] = {}
    for mutant in mutants:
        classes.setdefault(mutant[:2], []).append(mutant)
    if each is None:
        return [mutant for found in classes.values() for mutant in found]
    draw = random.Random(0)
    return [
        mutant for found in classes.values() for mutant in draw.sample(found, min(each, len(found)))
    ]


def schedule_mutants(schedule: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    """The edit, the letter of the task and the edited schedule."""
    for edit, task, rows in edits(schedule.rows):
        yield edit, task.kind, replace(schedule, rows=rows)
    for device, row in enumerate(schedule.rows):
        for at, task in enumerate(row):
            for edit, other in _other_tasks(schedule, task):
                changed = (*row[:at], other, *row[at + 1 :])
                rows = (*schedule.rows[:device], changed, *schedule.rows[device + 1 :])
                yield edit, task.kind, replace(schedule, rows=rows)
    for stage, copies in enumerate(schedule.copies):
        for device in range(-1, schedule.devices + 1):
            toggled = tuple({*copies} ^ {device})
            changed_copies = (*schedule.copies[:stage], toggled, *schedule.copies[stage + 1 :])
            yield "change copies", "-", replace(schedule, copies=changed_copies)
    for stage, home in enumerate(schedule.placement):
        for device in range(-1, schedule.devices + 1):
            if device != home:
                moved = (*schedule.placement[:stage], device, *schedule.placement[stage + 1 :])
                yield "change placement", "-", replace(schedule, placement=moved)
        own = schedule.delays
        for delay in range(-1, max(schedule.delays) + 2):
            if delay != own[stage]:
                delays = (*own[:stage], delay, *own[stage + 1 :])
                yield "change delay", "-", replace(schedule, delay=delays)


def _other_tasks(schedule: Schedule, task: Task) -> Iterator[tuple[str, Task]]:
    for stage in range(-1, schedule.stages + 1):
        if stage != task.stage:
            yield "change stage", replace(task, stage=stage)
    yield "change stage", replace(task, stage=None)
    for i in (None, *range(-1, schedule.microbatches + 1)):
        if i != task.microbatch:
            yield "change micro-batch", replace(task, microbatch=i)
    for batch in range(task.batch - 1, 2):
        if batch != task.batch:
            yield "change batch", replace(task, batch=batch)
    for kind in "FBIWROPAUX":
        if kind != task.kind:
            yield "change kind", replace(task, kind=kind)


RESTS = {"backward": "rest_backward", "weight_grad": "rest_weight_grad"}
RESTS |= {rest: whole for whole, rest in RESTS.items()}


def program_mutants(program: Program) -> Iterator[tuple[str, str, Program]]:
    """The edit, the name of the instruction's class and the edited program."""
    for edit, instruction, lists in edits(program.lists):
        yield edit, type(instruction).__name__, replace(program, lists=lists)
    for device, own in enumerate(program.lists):
        for at, instruction in enumerate(own):
            for edit, other in _other_instructions(program, instruction):
                changed = (*own[:at], other, *own[at + 1 :])
                lists = (*program.lists[:device], changed, *program.lists[device + 1 :])
                yield edit, type(instruction).__name__, replace(program, lists=lists)


def _other_instructions(
    program: Program, instruction: ins.Instruction
) -> Iterator[tuple[str, ins.Instruction]]:
    match instruction:
        case ins.Barrier() | ins.Pause():
            return
        case ins.OncePerStep():
            pass
        case ins.Update():
            yield "change version", replace(instruction, reads=instruction.reads + 1)
            yield "change version", replace(instruction, writes=instruction.writes - 1)
        case ins.Move():
            yield from _other_moves(program, instruction)
            return
        case _ if "version" in instruction.counted:
            reads: Any = instruction
            if (own := getattr(reads, "microbatch", None)) is not None:
                for i in {*range(-1, program.microbatches + 1)} - {own}:
                    yield "change micro-batch", replace(reads, microbatch=i)
            yield "change version", replace(reads, version=reads.version + 1)
            yield "change version", replace(reads, version=reads.version - 1)
    if (mine := getattr(instruction, "copy", None)) is not None:
        for copy in set(range(program.devices)) - {mine}:
            yield "change copy", replace(instruction, copy=copy)  # type: ignore[type-var]
    if (other := ins.find_opcode(RESTS.get(instruction.opcode, ""))) is not None:
        makes: Any = other
        yield "change rest", makes(*astuple(instruction))  # type: ignore[call-overload]
    if instruction.opcode == "partial_backward":
        part: Any = instruction
        for bucket in range(-1, 3):
            if bucket != part.bucket:
                yield "change bucket", replace(part, bucket=bucket)
        for kind in "BWF".replace(part.kind, ""):
            yield "change bucket", replace(part, kind=kind)
    if isinstance(instruction, ins.Forward):
        yield "change keep", replace(instruction, keeps=not instruction.keeps)
        yield "change keep", replace(instruction, again=not instruction.again)
    changed: Any = instruction
    for stage in range(-1, program.stages + 1):
        if stage != instruction.stage:
            yield "change stage", replace(changed, stage=stage)
    for batch in (instruction.batch - 1, instruction.batch + 1):
        yield "change batch", replace(changed, batch=batch)


def _other_moves(program: Program, instruction: ins.Move) -> Iterator[tuple[str, ins.Instruction]]:
    buffer = instruction.buffer
    make = type(instruction)
    for i in range(-1, program.microbatches + 1):
        if i != buffer.microbatch:
            yield "change micro-batch", make(buffer._replace(microbatch=i))
    for batch in (buffer.batch - 1, buffer.batch + 1):
        yield "change batch", make(buffer._replace(batch=batch))
    for edge in (*program.edges, *program.gradients):
        if (edge.value, edge.source, edge.target) != buffer[1:4]:
            other = buffer._replace(
                kind=edge.kind, value=edge.value, source=edge.source, target=edge.target
            )
            yield "change value", make(other)
    for kind in [made for made in ins.every_opcode().values() if issubclass(made, ins.Move)]:
        if kind is not make:
            yield "change opcode", kind(buffer)


def launch_mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """Each wait and each record dropped, moved in its list, or given to another stream."""

    def changed(*changes: tuple[int, int, Launch]) -> Program:
        launches = [list(own) for own in program.launches]
        for device, position, launch in changes:
            launches[device][position] = launch
        return replace(program, launches=tuple(map(tuple, launches)))

    for device, own in enumerate(program.launches):
        for at, launch in enumerate(own):
            for event in launch.waits:
                left = replace(launch, waits=tuple(e for e in launch.waits if e != event))
                yield "drop a wait", changed((device, at, left))
                for to in (at - 2, at - 1, at + 1, at + 2):
                    if 0 <= to < len(own) and event not in own[to].waits:
                        there = replace(own[to], waits=(*own[to].waits, event))
                        yield "move a wait", changed((device, at, left), (device, to, there))
            if launch.record is not None:
                left = replace(launch, record=None)
                yield "drop a record", changed((device, at, left))
                for to in (at - 3, at - 2, at - 1, at + 1, at + 2, at + 3):
                    if 0 <= to < len(own) and own[to].record is None:
                        there = replace(own[to], record=launch.record)
                        yield "move a record", changed((device, at, left), (device, to, there))
            if launch.stream != "compute":
                yield "another stream", changed((device, at, replace(launch, stream="compute")))
            else:
                yield "another stream", changed((device, at, replace(launch, stream="in9")))
