"""One walk over the lists of all devices, each as far as it comes, and what they wait for.

Whoever orders a program's instructions, simulates, verifies or draws it, walks it here: what
waits for what is written once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, get_args

from fxpipe.errors import Fault, InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Launch
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.value import Buffer

Wait = tuple[int, int, int]
"""A position that comes after one of another row: (position, row, position there).

What waits for itself waits for ever.
"""

Waits = Sequence[Sequence[Wait]]
"""Row → its waits, by position."""

Key = tuple[str, int | None, int]
"""Kind, micro-batch and stage: one task of every batch. An A on a copy of a stage has the device of
that copy for a micro-batch."""

_CONNECTED = frozenset(get_args(ins.Sending | ins.Receiving | ins.Meeting))
"""The instructions that others wait for, or that wait for others."""


class Place(NamedTuple):
    """A position in a device's list."""

    device: int
    position: int


@dataclass(frozen=True)
class Walked:
    """How far some rows have come.

    Attributes:
        turns: one after another; each position comes after all that it waits for.
        stuck: row → the wait at which it is stuck, for those that do not come to their ends.
    """

    turns: list[Turn]
    stuck: dict[int, Wait]

    def faults(self, text: Callable[[int, int], str], cure: str) -> Iterator[Fault]:
        """A fault for each row of each circle of rows that wait for each other.

        Args:
            text: what stands at a position of a row.
            cure: what to do about it.
        """
        seen: set[int] = set()
        for start in self.stuck:
            path: list[int] = []
            row = start
            while row in self.stuck and row not in seen:
                seen.add(row)
                path.append(row)
                row = self.stuck[row][1]
            for device in path[path.index(row) :] if row in path else ():
                position, other, on = self.stuck[device]
                yield Fault(
                    f"deadlock: it waits until device {other} is past position {on}, "
                    f"{text(other, on)}, and that device is stuck in the same circle",
                    cure,
                    device,
                    position,
                    text(device, position),
                )


def walk(
    lengths: Sequence[int], waits: Waits, clock: Callable[[int, int], float] | None = None
) -> Walked:
    """Go through all rows, each in its order, until they end or are stuck.

    It takes time in proportion to the number of waits, and to the logarithm of that of rows.

    Args:
        lengths: row → how many positions it has.
        waits: what they wait for.
        clock: row and position → when the row is free after it. The row that is free first then
            goes on, by one position; without a clock a row goes on until it waits.
    """
    passed, done, free = [0] * len(lengths), [0] * len(lengths), [0.0] * len(lengths)
    sleepers: list[list[tuple[int, int]]] = [[] for _ in lengths]  # heaps: (position, who)
    ready = [(0.0, row) for row in range(len(lengths))]
    turns: list[Turn] = []
    while ready:
        _, row = heapq.heappop(ready)
        own, number, end = waits[row], done[row], lengths[row]
        while number < len(own):
            position, other, on = own[number]
            if (position if other == row else passed[other]) <= on:
                end = position
                break
            number += 1
        done[row] = number
        stop = end if clock is None else min(end, passed[row] + 1)
        if stop > passed[row]:
            if clock is not None:
                free[row] = clock(row, passed[row])
            if turns and turns[-1][0] == row:
                turns.pop()
            turns.append((row, stop))
            passed[row] = stop
            heap = sleepers[row]
            while heap and heap[0][0] < stop:
                waiter = heapq.heappop(heap)[1]
                heapq.heappush(ready, (free[waiter], waiter))
        if stop < end:
            heapq.heappush(ready, (free[row], row))
        elif number < len(own) and other != row:
            heapq.heappush(sleepers[other], (on, row))
    stuck = {row: own[done[row]] for row, own in enumerate(waits) if done[row] < len(own)}
    return Walked(turns, stuck)


def waits_of(program: Program) -> list[list[Wait]]:
    """What the instructions of each device wait for on any device, in one window.

    A receive or a pop waits for its send or stash, a barrier or a pause for all that the other
    devices do before theirs, and an instruction of a stream for the events that it is launched
    after. What an earlier window has sent or recorded is there already. What never comes is
    waited for for ever.
    """
    lists = program.lists
    waits: list[list[Wait]] = [[] for _ in lists]
    sent: dict[Buffer, Place] = {}
    arrivals: list[tuple[int, int, Buffer]] = []
    met: dict[type, list[list[int]]] = {
        kind: [[] for _ in lists] for kind in (ins.Barrier, ins.Pause)
    }
    for device, own in enumerate(lists):
        for position, x in enumerate(own):
            if type(x) not in _CONNECTED:
                continue
            if isinstance(x, ins.Sending):
                sent.setdefault(x.buffer, Place(device, position))
            elif isinstance(x, ins.Receiving):
                arrivals.append((device, position, x.buffer))
            else:
                met[type(x)][device].append(position)
    for device, position, buffer in arrivals:
        if buffer in sent:
            waits[device].append((position, *sent[buffer]))
        elif buffer.batch >= 0:
            waits[device].append((position, device, position))
    for places in met.values():
        for meeting in zip_longest(*places):
            _add_meeting(waits, meeting)
    recorded: dict[int, Place] = {}
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            if launch.record is not None and not launch.record.batch:
                recorded.setdefault(launch.record.number, Place(device, position))
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            for event in launch.waits:
                on = recorded.get(event.number)
                if on is None or event.batch > 0:
                    waits[device].append((position, device, position))
                elif not event.batch:
                    waits[device].append((position, *on))
    for each in waits:
        each.sort()
    return waits


def _add_meeting(waits: list[list[Wait]], places: Sequence[int | None]) -> None:
    """All devices meet at these places, or wait for ever for those that do not come."""
    for device, here in enumerate(places):
        if here is not None and None in places:
            waits[device].append((here, device, here))
        elif here is not None:
            waits[device] += [(here, other, at - 1) for other, at in enumerate(places) if at]


def key_index(schedule: Schedule, task: Task, device: int) -> int | None:
    """What stands for the micro-batch in a task's ``Key``: of an A on a copy the copy's device."""
    i, stage = task.microbatch, task.stage
    if task.kind != "A" or stage is None or not 0 <= stage < len(schedule.copies):
        return i
    return device if device in schedule.copies[stage] else i


def needs_of(schedule: Schedule) -> Callable[[Key], list[Key]]:
    """Task → the tasks of its batch that must come before it, if the schedule has them."""
    kinds = schedule.kinds
    near = {
        letter: [
            (before, there, KINDS[before].per_microbatch)
            for befores, there in ((kind.follows, 0), (kind.previous, -1), (kind.next, 1))
            for before in befores
            if before in kinds
        ]
        for letter, kind in KINDS.items()
    }
    gathers = {k: [b for b in kind.gathers if b in kinds] for k, kind in KINDS.items()}
    every = range(schedule.microbatches)
    copies = schedule.working or ((),) * schedule.stages
    # stage → its own device, as None, and its copies → the micro-batches that each computes
    parts: list[dict[int | None, Sequence[int]]] = [{None: every} for _ in copies]
    for stage, devices in enumerate(copies):
        for device in (None, *devices) if devices else ():
            there = schedule.placement[stage] if device is None else device
            parts[stage][device] = [j for j in every if schedule.device_of(stage, j) == there]

    def needs(key: Key) -> list[Key]:
        letter, i, stage = key
        if letter == "A":
            return [
                (before, j, stage) for before, _, _ in near["A"] for j in parts[stage].get(i, ())
            ]
        if i is not None:
            return [
                (before, i if each else None, stage + there) for before, there, each in near[letter]
            ]
        found: list[Key] = [
            (before, j, stage)
            for before, _, each in near[letter]
            for j in (every if each else parts[stage])
        ]
        # gradients are added in order: on each device the last micro-batch's come last
        found += [
            (before, max(own, default=0) if KINDS[before].per_microbatch else device, s)
            for before in gathers[letter]
            for s, devices in enumerate(parts)
            for device, own in devices.items()
        ]
        return found

    return needs


def turns_of(program: Program) -> tuple[Turn, ...]:
    """The turns of one window in which one thread can run, or launch, the lists of all devices.

    An event is recorded before it is waited for, and a value sent before it is received; a
    barrier or a pause comes on all devices, one right after another. Of the devices that can go
    on it is the turn of the one whose computations are furthest behind, if each takes the time of
    its kind: so each has work early, however many share the thread.

    Raises:
        InputError: the program gets stuck.
    """
    lists = program.lists
    # a device that does one instruction after another has no launches
    launches = program.launches or [[Launch()] * len(own) for own in lists]
    free: defaultdict[tuple[int, str], float] = defaultdict(float)
    ends: dict[int | Buffer, float] = {}

    def clock(device: int, position: int) -> float:
        x, launch = lists[device][position], launches[device][position]
        stream = device, launch.stream
        awaited = [ends[event.number] for event in launch.waits if not event.batch]
        if isinstance(x, ins.Receiving):
            awaited.append(ends.pop(x.buffer, 0.0))
        end = free[stream] = max(free[stream], *awaited, 0.0) + usual_cost(x)
        if isinstance(x, ins.Sending):
            ends[x.buffer] = end
        if launch.record is not None:
            ends[launch.record.number] = end
        return free[device, COMPUTE]

    waits = waits_of(program)
    for own, more in zip(waits, _in_one_thread(program), strict=True):
        own += more
        own.sort()
    walked = walk([len(own) for own in lists], waits, clock)
    if walked.stuck:
        raise InputError(f"program {program.name!r} gets stuck; Program.verify() tells where")
    return tuple(walked.turns)


def _in_one_thread(program: Program) -> list[list[Wait]]:
    """What instructions come after besides, where one thread has one after another.

    Nobody goes on from a meeting before all have come to it. And an update comes after those
    that it awaits, of ``Versions.awaited``: all stages then have the version that a failure would
    take them back to.
    """
    waits: list[list[Wait]] = [[] for _ in program.lists]
    meetings = [
        [at for at, x in enumerate(own) if isinstance(x, ins.Meeting)] for own in program.lists
    ]
    for places in zip(*meetings, strict=False):
        for device, here in enumerate(places):
            waits[device] += [(here + 1, d, at) for d, at in enumerate(places) if d != device]
    every = [x for own in program.lists for x in own]
    delay, *others = {-x.version for x in every if isinstance(x, ins.Forward)} or {0}
    alone = len(set(program.placement)) == program.stages
    if delay and not others and alone and not any(isinstance(x, ins.Run) for x in every):
        updates = [
            (x.writes, Place(device, at))
            for device, own in enumerate(program.lists)
            for at, x in enumerate(own)
            if isinstance(x, ins.Update)
        ]
        for writes, (device, position) in updates:
            waits[device] += [(position, *on) for before, on in updates if before <= writes - delay]
    return waits


def usual_cost(instruction: ins.Instruction) -> float:
    """The time of the kind of task that an instruction runs; 0 for one that computes nothing."""
    letter = ins.letter_of(instruction)
    if letter is None:
        return 0.0
    return KINDS[letter].cost if letter in KINDS else 1.0
