"""A program with streams as one without: for devices that do one instruction after another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program

Arrival = ins.Load | ins.Receive | ins.Pop


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
    pending: defaultdict[str, deque[Arrival]] = defaultdict(deque)
    stream_of: dict[object, str] = {}
    for instruction, launch in zip(program.lists[device], program.launches[device], strict=True):
        if isinstance(instruction, Arrival):
            pending[launch.stream].append(instruction)
            stream_of[instruction.buffer] = launch.stream
            continue
        if isinstance(instruction, ins.Barrier | ins.Pause):
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
