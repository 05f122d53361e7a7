"""Give every instruction a stream, and the events that it waits for and records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, OFFLOAD, PREFETCH, Event, Launch, arrivals
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.passes.lowering.launch_order import Launched, launch_order, source_of
from fxpipe.passes.runner import comes_after


@dataclass(frozen=True)
class Streams:
    """Program → Program: copies go on beside the computations of both devices.

    Before::

        device 1
          forward   s1[0] v0 keep
          free      act:y:0->1[0]
          send      act:z:1->2[0]
          free      act:z:1->2[0]
          recv      act:y:0->1[1]
          forward   s1[1] v0 keep

    after, where device 2 receives ``act:z:1->2[0]`` and records ``e9``::

        device 1
          recv      act:y:0->1[1]    stream=in0 wait=e2,e4 record=e5
          forward   s1[0] v0 keep    wait=e3 record=e6
          free      act:y:0->1[0]
          send      act:z:1->2[0]
          forward   s1[1] v0 keep    wait=e5
          free      act:z:1->2[0]    wait=e9

    A device computes on one stream, and values arrive on one more for each device that they come
    from, and one for the caller's. The receive makes the copy, straight from the device that made
    the value, which a send only hands on.

    All memory of a device belongs to its stream of computations and is taken and let go in the
    order in which instructions are launched. So an arrival starts only when everything launched
    before it on its device is done, for its memory may come from there; to overlap a computation
    it is launched before that one. A value that was sent is freed after the copy, in the order of
    the sender's computations; so that these do not wait for it, the free comes behind the one
    that overlaps the copy, and only when the receiver, too, has come to where it uses the value.
    No memory is held back by an event, and none is let go before its last use.

    Attributes:
        ahead: how many computations an arrival may overlap: its memory is taken so much earlier.
    """

    ahead: int = 1
    name: ClassVar[str] = "streams"

    def __call__(self, program: Program) -> Program:
        """Place the instructions of a whole program.

        Raises:
            InputError: the program is not freed yet, or has streams already; ``ahead`` is negative.
        """
        comes_after(program, "streams", "free")
        if self.ahead < 0:
            raise InputError(f"ahead is {self.ahead}; give at least 0")
        lists = free_late(program, launch_order(program, self.ahead))
        moved = replace(program, lists=lists)
        return replace(
            moved, launches=_Events(moved).launches(), passes=(*program.passes, self.name)
        )


class _Spot(NamedTuple):
    """An instruction, and the batch of the value because of which it is waited for."""

    device: int
    position: int
    batch: int


class _Events:
    """Finds what each instruction must come after, and an event for each that is waited for."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._streams = [[_stream(program, x) for x in own] for own in program.lists]
        self._made: dict[tuple[int, object], _Spot] = {}
        self._used: defaultdict[tuple[int, object], list[_Spot]] = defaultdict(list)
        for device, own in enumerate(program.lists):
            for at, x in enumerate(own):
                for buffer in program.writes(x):
                    self._made[device, buffer[:5]] = _Spot(device, at, buffer.batch)
                for buffer in program.reads(x):
                    self._used[device, buffer[:5]].append(_Spot(device, at, buffer.batch))
                if isinstance(x, ins.Receiving):
                    origin = program.origin(x), x.buffer[:5]
                    self._used[origin].append(_Spot(device, at, x.buffer.batch))

    def launches(self) -> tuple[tuple[Launch, ...], ...]:
        """Device → the launch of each of its instructions."""
        waits = [list(self._waits(device)) for device in range(self._program.devices)]
        awaited = sorted({at[:2] for own in waits for spots in own for at in spots})
        numbers = {at: number for number, at in enumerate(awaited)}
        return tuple(
            tuple(
                Launch(
                    self._streams[device][at],
                    tuple(sorted(Event(numbers[on[:2]], on.batch) for on in spots)),
                    Event(numbers[device, at]) if (device, at) in numbers else None,
                )
                for at, spots in enumerate(own)
            )
            for device, own in enumerate(waits)
        )

    def _waits(self, device: int) -> Iterator[list[_Spot]]:
        """For each instruction of a device the others that it waits for, and in which step.

        What a stream has waited for before, in the same window, it need not wait for again.
        """
        seen: dict[tuple[str, int, str], int] = {}
        memory = self._window_before(device)
        for at in range(len(self._program.lists[device])):
            stream, waits = self._streams[device][at], []
            for on in sorted(self._needs(device, at, memory), key=_latest_first):
                other = self._streams[on.device][on.position]
                if (on.device, other) == (device, stream):
                    continue
                key = stream, on.device, other
                if on.batch or on.position > seen.get(key, -1):
                    waits.append(on)
                if not on.batch:
                    seen[key] = max(on.position, seen.get(key, -1))
            if stream == COMPUTE:
                memory = _Spot(device, at, 0)
            yield waits

    def _needs(self, device: int, at: int, memory: _Spot | None) -> set[_Spot]:
        """What an instruction comes after, with the step in which that runs. ``memory`` is what was
        last launched on the stream that memory belongs to."""
        program, x = self._program, self._program.lists[device][at]
        needs: set[_Spot | None] = set()
        for buffer in program.reads(x):
            needs.add(_before(self._made.get((device, buffer[:5])), buffer))
        if isinstance(x, ins.Arrival | ins.Prefetch):
            needs.add(memory)
        if isinstance(x, ins.Receiving):
            needs.add(_before(self._made.get((program.origin(x), x.buffer[:5])), x.buffer))
        for buffer in program.ends(x):
            place = device, buffer[:5]
            for spot in (self._made.get(place), *self._used[place]):
                needs.add(_before(spot, buffer))
        return {spot for spot in needs if spot is not None and spot[:2] != (device, at)}

    def _window_before(self, device: int) -> _Spot | None:
        """The last computation of the window before this one, if there is one."""
        streams = self._streams[device]
        if not self._program.depth or COMPUTE not in streams:
            return None
        return _Spot(device, max(at for at, each in enumerate(streams) if each == COMPUTE), -1)


def _latest_first(spot: _Spot) -> tuple[int, int, int]:
    return -spot.batch, -spot.position, spot.device


def _before(spot: _Spot | None, buffer: Buffer) -> _Spot | None:
    """The same spot with the step in which it meets a buffer's batch."""
    return spot and spot._replace(batch=buffer.batch - spot.batch)


def _stream(program: Program, instruction: ins.Instruction) -> str:
    if isinstance(instruction, ins.Arrival):
        return arrivals(source_of(program, instruction))
    if isinstance(instruction, ins.Offload | ins.Prefetch):
        return OFFLOAD if isinstance(instruction, ins.Offload) else PREFETCH
    return COMPUTE


def free_late(
    program: Program, order: Sequence[Sequence[Launched]]
) -> tuple[tuple[ins.Instruction, ...], ...]:
    """Device → its list, where no free of a sent value makes its device wait for the copy.

    The free comes behind one more computation of the sender, which overlaps the copy, and not
    before the receiver has come to the computation that uses the value, for then the copy is done;
    but before any barrier or pause. Where batches overlap, a value that arrives in a later window
    is freed in that window.
    """
    uses = _uses(program, order)
    return tuple(_moved(device, own, uses) for device, own in enumerate(order))


class _Use(NamedTuple):
    """The first use of a sent value on its receiver: by then the copy is done."""

    source: int
    rank: int
    start: float
    batch: int


def _uses(program: Program, order: Sequence[Sequence[Launched]]) -> dict[object, _Use]:
    """Value → the use on the device that receives it, in the window in which it arrives."""
    uses: dict[object, _Use] = {}
    for own in order:
        unused: set[Buffer] = set()
        for rank, start, x in own:
            if isinstance(x, ins.Receiving):
                uses[x.buffer[:5]] = _Use(program.origin(x), rank, start, x.buffer.batch)
                unused.add(x.buffer)
            for buffer in unused.intersection(program.reads(x)):
                unused.discard(buffer)
                uses[buffer[:5]] = uses[buffer[:5]]._replace(rank=rank, start=start)
    return uses


def _moved(
    device: int, own: Sequence[Launched], uses: dict[object, _Use]
) -> tuple[ins.Instruction, ...]:
    stops = [at for at, each in enumerate(own) if not isinstance(each.instruction, ins.Move)]
    ranks = [own[at].rank for at in stops]
    starts = [own[at].start for at in stops]
    meetings = [
        number for number, at in enumerate(stops) if isinstance(own[at].instruction, ins.Meeting)
    ]
    sent = {
        each.instruction.buffer: at
        for at, each in enumerate(own)
        if isinstance(each.instruction, ins.Sending)
    }
    kept: list[ins.Instruction | None] = [each.instruction for each in own]
    late: defaultdict[int, list[ins.Instruction]] = defaultdict(list)
    for at, each in enumerate(own):
        if not isinstance(each.instruction, ins.Free):
            continue
        buffer = each.instruction.buffer
        use = uses.get(buffer[:5])
        if use is None or use.source != device:
            continue
        first = bisect_right(ranks, use.rank)
        stop = max(first, bisect_left(starts, use.start))
        if use.batch == buffer.batch:
            stop = max(stop, bisect_right(stops, sent[buffer]) + 1)
        meeting = bisect_left(meetings, first)
        if meeting < len(meetings):
            stop = min(stop, meetings[meeting])
        kept[at] = None
        place = stops[stop] if stop < len(stops) else len(own)
        late[place].append(ins.Free(buffer._replace(batch=use.batch)))
    merged: list[ins.Instruction] = []
    for at, x in enumerate([*kept, None]):
        merged.extend(late.get(at, ()))
        if x is not None:
            merged.append(x)
    return tuple(merged)
