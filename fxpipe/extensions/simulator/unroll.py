"""Rewrite a program: ``unroll`` writes all of its steps out, ``blocking`` removes its streams.

An unrolled program shows what a repeating window does from the first step to the flush.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program

Item = TypeVar("Item")

_MOST = 10_000_000


def unroll(program: Program, steps: int) -> Program:
    """Write out the run of a program over some steps, and the flush after the last.

    A device's list is its windows, one after another. Step t runs the instructions of the batches
    t − depth … t and leaves out those of batches that do not exist. Batches, versions and events
    count from the first step, so all are at least 0: in step t, an instruction of batch b that
    reads version v gets the batch t + b and the version max(t + v, 0). Waits for events that
    nothing records are left out.

    Raises:
        InputError: ``steps`` is less than 1, or the result would be too long.
    """
    runs = [
        list(_repeated([(x.batch, at) for at, x in enumerate(row)], steps, program.depth))
        for row in program.lists
    ]
    lists = tuple(
        tuple([absolute(row[at], step) for step, at in run])
        for row, run in zip(program.lists, runs, strict=True)
    )
    launches = [
        [_later(row[at], step) for step, at in run]
        for row, run in zip(program.launches, runs, strict=False)
    ]
    recorded = {launch.record for row in launches for launch in row}
    recording = tuple(tuple([_waiting(launch, recorded) for launch in row]) for row in launches)
    return replace(program, lists=lists, launches=recording)


def _later(launch: Launch, step: int) -> Launch:
    """A launch with its events counted from the first step."""
    waits = tuple([event._replace(batch=event.batch + step) for event in launch.waits])
    record = launch.record and launch.record._replace(batch=launch.record.batch + step)
    return Launch(launch.stream, waits, record)


def _waiting(launch: Launch, recorded: set[Event | None]) -> Launch:
    """A launch without waits for events that nothing records."""
    return replace(launch, waits=tuple([e for e in launch.waits if e in recorded]))


def absolute(instruction: ins.Instruction, step: int) -> ins.Instruction:
    """An instruction as it runs in a step, its batch and version counted from the first step."""
    moved = instruction.later(step) if step else instruction
    match moved:
        case ins.Update(reads=reads, writes=writes) if min(reads, writes) < 0:
            return replace(moved, reads=max(reads, 0), writes=max(writes, 0))
    if getattr(moved, "version", 0) < 0:
        return replace(moved, version=0)  # type: ignore[type-var]
    return moved


def _repeated(
    window: Sequence[tuple[int, Item]], steps: int, depth: int
) -> Iterator[tuple[int, Item]]:
    """Repeat a window of (batch, item); yield step and item where the batch exists."""
    if steps < 1:
        raise InputError(f"steps is {steps}; a run needs at least 1")
    if (steps + depth) * max(len(window), 1) > _MOST:
        raise InputError(
            f"{steps + depth} steps of a device's {len(window)} tasks or instructions are more "
            f"than {_MOST}; give fewer steps"
        )
    for step in range(steps + depth):
        for batch, item in window:
            if 0 <= step + batch < steps:
                yield step, item


def blocking(program: Program) -> Program:
    """Remove the launches of a program, and let each value arrive right before its first use.

    With streams, an arrival is launched early and delays nothing. Without, the device waits at the
    arrival, so it is moved as late as possible. Values from one device keep their order, and all
    arrive before a barrier or a pause that came after them.
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
        for buffer in (*instruction.uses(program), *instruction.ends(program)):
            if buffer in stream_of:
                queue = pending[stream_of[buffer]]
                while buffer in stream_of:
                    arrival = queue.popleft()
                    del stream_of[arrival.buffer]
                    yield arrival
        yield instruction
    for queue in pending.values():
        yield from queue
