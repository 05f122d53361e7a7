"""When the instructions of a program with streams run, if copies take time."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS


@dataclass
class Timed:
    """When the instructions ran.

    Attributes:
        makespan: the end of the last instruction.
        stalls: each instruction that waited for an event on an idle stream, and for how long.
        spans: device → start and end of each of its instructions.
    """

    makespan: float = 0.0
    stalls: list[tuple[ins.Instruction, float]] = field(default_factory=list)
    spans: list[list[tuple[float, float]]] = field(default_factory=list)


def timed(program: Program, copy: float) -> Timed:
    """Launch everything at once; each stream runs as soon as its waits allow."""
    run = Timed(spans=[[] for _ in program.lists])
    events: dict[Event, float] = {}
    free: dict[tuple[int, str], float] = {}
    done = [0] * program.devices
    while True:
        moved = False
        for device, own in enumerate(program.lists):
            while done[device] < len(own):
                x, launch = own[done[device]], program.launches[device][done[device]]
                if any(event not in events for event in launch.waits if event.batch == 0):
                    break
                stream = device, launch.stream
                idle = free.get(stream, 0.0)
                start = max([idle, *(events.get(event, 0.0) for event in launch.waits)])
                if start > idle:
                    run.stalls.append((x, start - idle))
                end = start + _time(x, copy)
                free[stream] = end
                run.spans[device].append((start, end))
                run.makespan = max(run.makespan, end)
                if launch.record is not None:
                    events[launch.record] = end
                done[device] += 1
                moved = True
        if not moved:
            assert all(at == len(own) for at, own in zip(done, program.lists, strict=True))
            return run


def _time(instruction: ins.Instruction, copy: float) -> float:
    if isinstance(instruction, ins.Receive):
        return copy
    if isinstance(instruction, ins.Load | ins.Move):
        return 0.0
    letter = instruction.letter
    return 0.0 if letter is None else KINDS[letter].cost
