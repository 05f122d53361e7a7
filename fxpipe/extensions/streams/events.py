"""Give every instruction a stream, and the events that it waits for and records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fxpipe.errors import InputError
from fxpipe.extensions.streams.launch_order import Ordered, arrivals, launch_order, source_of
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.passes.runner import comes_after
from fxpipe.torchtools.state import without_collection


@dataclass(frozen=True)
class Streams:
    """Program → Program: copies overlap the computations of both devices.

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

    A device computes on one stream. Values arrive on further ones: one for each device that they
    come from, and one for the caller. The receive copies a value straight from the device that made
    it; a send only hands the value on.

    All memory of a device belongs to its compute stream, and is allocated and freed in the order in
    which instructions are launched. So an arrival starts only when everything launched before it on
    its device is done, because its memory may come from there. To overlap a computation, it is
    launched before that computation. A sent value is freed on the sender's compute stream, after
    the copy. So that the sender does not wait for the copy, the free comes behind a computation
    that overlaps it, and not before the receiver has reached the value's use. No event holds back
    memory, and no memory is freed before its last use.

    Attributes:
        ahead: how many computations an arrival may overlap. Its memory is allocated that much
            earlier.
    """

    ahead: int = 1
    name: ClassVar[str] = "streams"

    @without_collection()
    def __call__(self, program: Program) -> Program:
        """Place the instructions of a whole program.

        Raises:
            InputError: ``free`` has not run yet, ``streams`` has, or ``ahead`` is negative.
        """
        comes_after(program, "streams", "free")
        if self.ahead < 0:
            raise InputError(f"ahead is {self.ahead}; give at least 0")
        lists = free_late(program, launch_order(program, self.ahead))
        launches = _Events(program, lists).launches()
        return replace(program, lists=lists, launches=launches, passes=(*program.passes, self.name))


class _Spot(NamedTuple):
    """The place of an instruction, and the batch in which it touches the value in question."""

    device: int
    position: int
    batch: int


_Value = tuple[str, str, int, int, int]
"""A buffer without its batch, which is its last field."""


class _Events:
    """Finds what each instruction of these lists must wait for, and numbers the events."""

    def __init__(self, program: Program, lists: Sequence[Sequence[ins.Instruction]]) -> None:
        self._program, self._lists = program, lists
        self._streams = [[_stream(program, x) for x in list_] for list_ in lists]
        # what each instruction uses, which takes long to ask for
        self._uses = [[x.uses(program) for x in list_] for list_ in lists]
        self._made: list[dict[_Value, _Spot]] = [{} for _ in lists]
        self._used: list[defaultdict[_Value, list[_Spot]]] = [defaultdict(list) for _ in lists]
        for device, list_ in enumerate(lists):
            made, used = self._made[device], self._used[device]
            for at, x in enumerate(list_):
                for buffer in x.makes(program):
                    made[buffer[:5]] = _Spot(device, at, buffer.batch)
                for buffer in self._uses[device][at]:
                    used[buffer[:5]].append(_Spot(device, at, buffer.batch))
                if isinstance(x, ins.Receive):
                    spot = _Spot(device, at, x.buffer.batch)
                    self._used[program.origin(x)][x.buffer[:5]].append(spot)

    def launches(self) -> tuple[tuple[Launch, ...], ...]:
        """Device → the launch of each of its instructions."""
        waits = [list(self._waits(device)) for device in range(len(self._lists))]
        awaited = sorted({(s.device, s.position) for w in waits for spots in w for s in spots})
        numbers: list[dict[int, int]] = [{} for _ in self._lists]  # position → number
        for number, (device, at) in enumerate(awaited):
            numbers[device][at] = number

        def events(spots: list[_Spot]) -> tuple[Event, ...]:
            found = [Event(numbers[spot.device][spot.position], spot.batch) for spot in spots]
            return tuple(sorted(found))

        return tuple(
            tuple(
                Launch(
                    stream,
                    events(spots) if spots else (),
                    Event(numbers[device][at]) if at in numbers[device] else None,
                )
                for at, (stream, spots) in enumerate(zip(self._streams[device], list_, strict=True))
            )
            for device, list_ in enumerate(waits)
        )

    def _waits(self, device: int) -> Iterator[list[_Spot]]:
        """For each instruction of a device, yield the instructions that it waits for, with steps.

        A stream does not wait again for what it has waited for earlier in the same window.
        """
        seen: dict[tuple[str, int, str], int] = {}
        memory = self._window_before(device)
        for at, stream in enumerate(self._streams[device]):
            waits = []
            needs = self._needs(device, at, memory)
            if len(needs) > 1:
                needs.sort(key=lambda s: (-s.batch, -s.position, s.device))
            for spot in needs:
                source = self._streams[spot.device][spot.position]
                if source == stream and spot.device == device:
                    continue
                key = stream, spot.device, source
                if spot.batch or spot.position > seen.get(key, -1):
                    waits.append(spot)
                if not spot.batch:
                    seen[key] = max(spot.position, seen.get(key, -1))
            if stream == COMPUTE:
                memory = _Spot(device, at, 0)
            yield waits

    def _needs(self, device: int, at: int, memory: _Spot | None) -> list[_Spot]:
        """The instructions that one comes after, each with the step in which it runs. ``memory`` is
        the last one launched on the compute stream."""
        x, made = self._lists[device][at], self._made[device]
        needs: set[_Spot] = set()
        for buffer in self._uses[device][at]:
            if (spot := made.get(buffer[:5])) is not None:
                needs.add(_before(spot, buffer))
        if memory is not None and x.takes and self._streams[device][at] != COMPUTE:
            needs.add(memory)
        if isinstance(x, ins.Receive):
            sent = self._made[self._program.origin(x)]
            if (spot := sent.get(x.buffer[:5])) is not None:
                needs.add(_before(spot, x.buffer))
        for buffer in x.ends(self._program):
            value = buffer[:5]
            if (spot := made.get(value)) is not None:
                needs.add(_before(spot, buffer))
            for spot in self._used[device].get(value, ()):
                needs.add(_before(spot, buffer))
        return [spot for spot in needs if spot.position != at or spot.device != device]

    def _window_before(self, device: int) -> _Spot | None:
        """The last computation of the window before this one, if windows overlap."""
        computed = [at for at, stream in enumerate(self._streams[device]) if stream == COMPUTE]
        return _Spot(device, computed[-1], -1) if self._program.depth and computed else None


def _before(spot: _Spot, buffer: Buffer) -> _Spot:
    """The same spot with the step in which it touches a buffer's batch."""
    if not spot.batch and not buffer.batch:
        return spot
    return spot._replace(batch=buffer.batch - spot.batch)


def _stream(program: Program, instruction: ins.Instruction) -> str:
    if isinstance(instruction, ins.Arrival):
        return arrivals(source_of(program, instruction))
    return instruction.stream


def free_late(
    program: Program, order: Sequence[Sequence[Ordered]]
) -> tuple[tuple[ins.Instruction, ...], ...]:
    """Device → its list, with the frees of sent values moved back so that no sender waits for a
    copy.

    The free comes behind one more computation of the sender, which overlaps the copy, and not
    before the receiver has reached the computation that uses the value: by then the copy is done.
    But it stays before any barrier or pause. Where batches overlap, a value that arrives in a later
    window is freed in that window.
    """
    uses = _uses(program, order)
    return tuple(_moved(device, list_, uses) for device, list_ in enumerate(order))


class _Use(NamedTuple):
    """The first use of a sent value on its receiver. By then the copy is done."""

    source: int
    rank: int
    start: float
    batch: int


def _uses(program: Program, order: Sequence[Sequence[Ordered]]) -> dict[_Value, _Use]:
    """Value → its use on the device that receives it, in the window in which it arrives."""
    uses: dict[_Value, _Use] = {}
    for list_ in order:
        unused: set[Buffer] = set()
        for rank, start, x, used in list_:
            if isinstance(x, ins.Receive):
                uses[x.buffer[:5]] = _Use(program.origin(x), rank, start, x.buffer.batch)
                unused.add(x.buffer)
            for buffer in used:
                if buffer in unused:
                    unused.discard(buffer)
                    uses[buffer[:5]] = uses[buffer[:5]]._replace(rank=rank, start=start)
    return uses


def _moved(
    device: int, order: Sequence[Ordered], uses: dict[_Value, _Use]
) -> tuple[ins.Instruction, ...]:
    list_ = [launched.instruction for launched in order]
    stops = [at for at, x in enumerate(list_) if not isinstance(x, ins.Move)]
    ranks = [order[at].rank for at in stops]
    starts = [order[at].start for at in stops]
    meetings = [n for n, at in enumerate(stops) if isinstance(list_[at], ins.Meeting)]
    sent = {x.buffer: at for at, x in enumerate(list_) if isinstance(x, ins.Send)}
    late: defaultdict[int, list[ins.Instruction]] = defaultdict(list)
    moved: set[int] = set()
    for at, x in enumerate(list_):
        if not isinstance(x, ins.Free):
            continue
        use = uses.get(x.buffer[:5])
        if use is None or use.source != device:
            continue
        first = bisect_right(ranks, use.rank)
        stop = max(first, bisect_left(starts, use.start))
        if use.batch == x.buffer.batch:
            stop = max(stop, bisect_right(stops, sent[x.buffer]) + 1)
        meeting = bisect_left(meetings, first)
        if meeting < len(meetings):
            stop = min(stop, meetings[meeting])
        moved.add(at)
        place = stops[stop] if stop < len(stops) else len(list_)
        late[place].append(ins.Free(x.buffer._replace(batch=use.batch)))
    merged: list[ins.Instruction] = []
    for at, x in enumerate(list_):
        merged += late.get(at, ())
        if at not in moved:
            merged.append(x)
    return (*merged, *late[len(list_)])
