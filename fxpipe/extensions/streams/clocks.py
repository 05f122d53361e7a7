"""Accesses of one memory that no stream and no event puts in order are found, in any program.

The program is run on nothing, with a clock for each stream: how many instructions of each stream
have ended for certain. An instruction that is launched takes the clock of its stream, with those of
the events that it waits for; an event takes the clock of the stream that records it. Of two
accesses, the first is over if the clock of the second has counted it.

Where batches overlap, windows are run until each batch of the first one is through. Order goes from
window to window, and a stream runs its windows in turn: what is in order here is so for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import waits_of, walk
from fxpipe.text.program import print_instruction

Memory = tuple[object, ...]
"""What is accessed: a buffer on a device, what a stage keeps from batch to batch, or the memory of
a device that its allocator gives out anew."""


class _Access(NamedTuple):
    """A launched instruction: which one of its stream, from 0, and where and in which window."""

    stream: int
    number: int
    device: int
    position: int
    window: int


@dataclass
class _Accesses:
    """Those of one memory so far: the last that writes it, then the last on each stream that reads
    it, and the one that ends it."""

    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)
    end: _Access | None = None


class _How(NamedTuple):
    """Behind which earlier accesses one must come: ``all``, the ``writes`` or none; and as what it
    counts for later ones."""

    behind: str
    counts: str


_READ, _CHANGE = _How("writes", "read"), _How("all", "write")
_MAKE, _END = _How("", "write"), _How("all", "end")
# an allocator gives out again what an instruction has let go as soon as that is launched
_LET_GO, _TAKE = _How("", "read"), _How("all", "")

_Touch = tuple[_How, Memory, int | None, Buffer | str]
"""How a memory is touched, the memory, its batch if it has one, and its name."""


def unordered(program: Program) -> Iterator[Fault]:
    """Yield a fault for each access that may start before one that it must come after has ended.

    The program must have launches, and run to its end. The time is proportional to the number of
    instructions, windows and streams.
    """
    faults = [*_never(program)]
    yield from faults or _Clocks(program).run()


def _never(program: Program) -> Iterator[Fault]:
    """Check that each event is recorded by one instruction, before its device waits for it."""
    recorded: dict[int, tuple[int, int]] = {}

    def fault(device: int, position: int, what: str, cure: str) -> Fault:
        text = print_instruction(program.lists[device][position])
        return Fault(what, cure, device, position, text)

    places = [(d, p, x) for d, own in enumerate(program.launches) for p, x in enumerate(own)]
    for device, position, launch in places:
        if launch.record is not None:
            number, batch = launch.record
            there = recorded.setdefault(number, (device, position))
            if there != (device, position):
                what = f"e{number} is recorded already: device {there[0]}, position {there[1]}"
                yield fault(device, position, what, "record each event once")
            elif batch:
                what = f"it records {launch.record}, of another step"
                yield fault(device, position, what, f"record e{number}")
    for device, position, launch in places:
        for event in launch.waits:
            at = recorded.get(event.number)
            if at is None:
                cure = "let what it needs record it, or leave out the wait"
                yield fault(device, position, f"it waits for {event}, which nothing records", cure)
                continue
            own = at[0] == device and at[1] >= position
            if event.batch > 0 or (own and not event.batch):
                what = f"it waits for {event}, which is recorded only later: position {at[1]}"
                yield fault(device, position, what, "wait for it behind that")


class _Clocks:
    def __init__(self, program: Program) -> None:
        self._program = program
        names = sorted({(d, x.stream) for d, own in enumerate(program.launches) for x in own})
        self._streams = {name: number for number, name in enumerate(names)}
        self._clocks = [[0] * len(names) for _ in names]
        self._events: dict[tuple[int, int], tuple[_Access, list[int]]] = {}  # number and window
        self._memories: defaultdict[Memory, _Accesses] = defaultdict(_Accesses)
        self._touches = [
            [[*self._touched(device, x)] for x in own] for device, own in enumerate(program.lists)
        ]

    def run(self) -> Iterator[Fault]:
        program = self._program
        turns = walk([len(own) for own in program.lists], waits_of(program)).turns
        seen: set[tuple[int, ...]] = set()
        for window in range(program.depth + 1):
            at = [0] * program.devices  # of each device, how many are launched
            for device, stop in turns:
                for position in range(at[device], stop):
                    for name, before in self._launch(window, device, position):
                        places = device, position, before.device, before.position
                        if places not in seen:
                            seen.add(places)
                            yield self._fault(window, (device, position), name, before)
                at[device] = stop

    def _touched(self, device: int, x: ins.Instruction) -> Iterator[_Touch]:
        """What an instruction touches. A sent value is read where it is received."""
        if isinstance(x, ins.Send | ins.Output | ins.Meeting):
            return
        if isinstance(x, ins.Receive):
            origin = self._program.origin(x)
            yield _READ, (origin, x.buffer[:5]), x.batch, x.buffer
        for how, buffers in (
            (_MAKE, x.makes(self._program)),
            (_END, x.ends(self._program)),
            (_READ, x.uses(self._program)),
        ):
            for buffer in buffers:
                yield how, (device, buffer[:5]), buffer.batch, buffer
        if x.takes:
            yield _TAKE, (device,), None, "memory that is given out again"
        if x.stream == COMPUTE and not isinstance(x, ins.Arrival):
            yield _LET_GO, (device,), None, ""
        if not isinstance(x, ins.Move):
            for how, what in _of_stage(x):
                yield how, (device, what, x.stage), None, f"the {what} of stage {x.stage}"

    def _launch(
        self, window: int, device: int, position: int
    ) -> Iterator[tuple[Buffer | str, _Access]]:
        """Launch an instruction; yield what it may touch too early, and what must end before."""
        launch = self._program.launches[device][position]
        stream = self._streams[device, launch.stream]
        clock = self._clocks[stream]
        here = _Access(stream, clock[stream], device, position, window)
        for event in launch.waits:
            if (mark := self._events.get((event.number, window + event.batch))) is not None:
                last, ended = mark
                if clock[last.stream] <= last.number:  # else it has waited for that already
                    clock[:] = map(max, clock, ended)
        touches = [
            (how, self._memories[(*memory, batch if batch is None else window + batch)], name)
            for how, memory, batch, name in self._touches[device][position]
        ]
        for how, memory, name in touches:
            before = [memory.write, memory.end] if how.behind else []
            before += memory.reads.values() if how.behind == "all" else ()
            for access in before:
                if access is not None and clock[access.stream] <= access.number:
                    yield name, access
        for how, memory, _ in touches:
            if how.counts == "read":
                memory.reads[stream] = here
            elif how.counts == "write":
                memory.write, memory.reads = here, {}
            elif how.counts == "end":
                memory.end = here
        clock[stream] += 1
        if launch.record is not None:
            self._events[launch.record.number, window + launch.record.batch] = here, [*clock]

    def _fault(
        self, window: int, at: tuple[int, int], name: Buffer | str, before: _Access
    ) -> Fault:
        lists, launches = self._program.lists, self._program.launches
        device, position = before.device, before.position
        steps = window - before.window
        when = f" of {steps} steps before" if steps > 1 else " of the step before" if steps else ""
        return Fault(
            f"it touches {name}, and may start before {print_instruction(lists[device][position])}"
            f"{when} has ended: device {device}, position {position}, stream "
            f"{launches[device][position].stream}",
            "let that record an event, and this wait for it, or put both on one stream",
            *at,
            print_instruction(lists[at[0]][at[1]]),
        )


def _of_stage(x: ins.Instruction) -> Iterator[tuple[_How, str]]:
    """How an instruction touches what its stage keeps from batch to batch."""
    reads_weights = "version" in x.counted
    if x.letter == "F":
        yield _CHANGE, "buffers"
    if x.sums or x.reads_gradients or not (reads_weights or x.completes) or x.spends:
        yield _CHANGE, "gradients"
    if reads_weights or x.completes:
        yield _CHANGE if x.completes else _READ, "weights"
