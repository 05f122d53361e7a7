"""A program written as another: its steps in a row, or without its streams.

Steps in a row show what a window that repeats does from the first step to the flush.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule

Item = TypeVar("Item")

_MOST = 10_000_000


def unroll(program: Program, steps: int) -> Program:
    """The whole run of a program over so many steps, and the flush after the last.

    Each device's list is its windows, one after another. Step t runs what belongs to the batches
    t − depth … t; what belongs to a batch that does not exist is left out. Batches and versions
    count from the first step, so both are at least 0: an instruction of batch b that reads
    version v has the batch t + b and the version max(t + v, 0) in step t. An event of step t is
    of batch t; a wait for one that nothing records is left out.

    Raises:
        InputError: there is no step.
    """
    kept = [
        list(_repeated([(ins.batch_of(x), at) for at, x in enumerate(own)], steps, program.depth))
        for own in program.lists
    ]
    lists = tuple(
        tuple([absolute(own[at], step) for step, at in left])
        for own, left in zip(program.lists, kept, strict=True)
    )
    launches = _launches(
        [
            [_later(own[at], step) for step, at in left]
            for own, left in zip(program.launches, kept, strict=False)
        ]
    )
    return replace(program, lists=lists, launches=launches)


def _later(launch: Launch, step: int) -> Launch:
    """A launch with its events counted from the first step."""
    waits = tuple([event._replace(batch=event.batch + step) for event in launch.waits])
    record = launch.record and launch.record._replace(batch=launch.record.batch + step)
    return Launch(launch.stream, waits, record)


def _launches(launches: Sequence[Sequence[Launch]]) -> tuple[tuple[Launch, ...], ...]:
    """The same without waits for events that nothing records."""
    recorded = {launch.record for own in launches for launch in own}
    return tuple(
        tuple(
            [
                replace(launch, waits=tuple([e for e in launch.waits if e in recorded]))
                for launch in own
            ]
        )
        for own in launches
    )


def unroll_schedule(schedule: Schedule, steps: int) -> Schedule:
    """The same for a schedule: its rows, with batches that count from the first step.

    Raises:
        InputError: there is no step.
    """
    rows = tuple(
        tuple(
            [
                replace(task, batch=step + task.batch)
                for step, task in _repeated([(t.batch, t) for t in row], steps, schedule.depth)
            ]
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def absolute(instruction: ins.Instruction, step: int) -> ins.Instruction:
    """An instruction of a window as it runs in a step: its batch and version from the first on."""
    moved = shifted(instruction, step)
    match moved:
        case ins.Update(reads=reads, writes=writes) if min(reads, writes) < 0:
            return replace(moved, reads=max(reads, 0), writes=max(writes, 0))
        case ins.Compute() | ins.Run():
            return replace(moved, version=0) if moved.version < 0 else moved
    return moved


def shifted(instruction: ins.Instruction, steps: int) -> ins.Instruction:
    """The same instruction, its batch and version counted from so many steps earlier."""
    x = instruction
    if not steps:
        return x
    if isinstance(x, ins.Move):
        return type(x)(x.buffer._replace(batch=steps + x.buffer.batch))
    if isinstance(x, ins.Meeting):
        return x
    batch = steps + x.batch
    match x:
        case ins.Update(stage, reads, writes):
            return ins.Update(stage, steps + reads, steps + writes, batch)
        case ins.OncePerStep(stage):
            return type(x)(stage, batch)
        case ins.Give(stage, copy):
            return ins.Give(stage, copy, batch)
        case ins.Run(kind, stage, i, version):
            return ins.Run(kind, stage, i, steps + version, batch)
        case ins.Forward(stage, i, version, _, keeps, again):
            return ins.Forward(stage, i, steps + version, batch, keeps, again)
        case ins.Backward(rest=True) | ins.WeightGrad(rest=True):
            return type(x)(x.stage, x.microbatch, steps + x.version, batch, True)
        case ins.PartialBackward(stage, i, version, _, kind, bucket):
            return ins.PartialBackward(stage, i, steps + version, batch, kind, bucket)
    return type(x)(x.stage, x.microbatch, steps + x.version, batch)


def _repeated(
    own: Sequence[tuple[int, Item]], steps: int, depth: int
) -> Iterator[tuple[int, Item]]:
    """The step and the item of all windows, without those of batches that do not exist."""
    if steps < 1:
        raise InputError(f"steps is {steps}; a run needs at least 1")
    if (steps + depth) * max(len(own), 1) > _MOST:
        raise InputError(
            f"{steps + depth} steps of a device's {len(own)} tasks or instructions are more than "
            f"{_MOST}; give fewer steps"
        )
    for step in range(steps + depth):
        for batch, item in own:
            if 0 <= step + batch < steps:
                yield step, item


def blocking(program: Program) -> Program:
    """The same program without launches, in which each value arrives right before its first use.

    Where devices have streams, an arrival is launched early and holds nothing up. Here a device
    waits for it where it stands, so it stands as late as it can: values from one device still
    come in their order, and all of them before a barrier or a pause.
    """
    if not program.launches:
        return program
    lists = tuple(tuple(_late(program, device)) for device in range(program.devices))
    passes = tuple(name for name in program.passes if name != "streams")
    return replace(program, lists=lists, launches=(), passes=passes)


def _late(program: Program, device: int) -> Iterator[ins.Instruction]:
    pending: defaultdict[str, deque[ins.Arrival]] = defaultdict(deque)
    stream_of: dict[object, str] = {}
    for instruction, launch in zip(program.lists[device], program.launches[device], strict=True):
        if isinstance(instruction, ins.Arrival):
            pending[launch.stream].append(instruction)
            stream_of[instruction.buffer] = launch.stream
            continue
        if isinstance(instruction, ins.Meeting):
            for queue in pending.values():
                yield from queue
                queue.clear()
            stream_of.clear()
        for buffer in (*program.reads(instruction), *program.ends(instruction)):
            if buffer in stream_of:
                queue = pending[stream_of[buffer]]
                while buffer in stream_of:
                    arrival = queue.popleft()
                    del stream_of[arrival.buffer]
                    yield arrival
        yield instruction
    for queue in pending.values():
        yield from queue
