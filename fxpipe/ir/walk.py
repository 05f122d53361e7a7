"""What instructions and tasks wait for, and a walk over all devices that honours these waits.

The simulator, the verifiers, the drawings and the order for one thread all use this module.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from fxpipe.errors import Fault, InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Launch
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Key, Task, usual_cost
from fxpipe.ir.value import Buffer

Wait = tuple[int, int, int]
"""(position, row, position there): a position of a row that must come after one of another row.

A position that waits for itself waits for ever.
"""

Waits = Sequence[Sequence[Wait]]
"""Row → its waits, by position."""


class Place(NamedTuple):
    """A position in a device's list."""

    device: int
    position: int


@dataclass(frozen=True)
class Walked:
    """How far a walk has come.

    Attributes:
        turns: the turns of the rows, in an order in which each position comes after its waits.
        stuck: row → the wait at which it is stuck, for each row that does not reach its end.
    """

    turns: list[Turn]
    stuck: dict[int, Wait]

    def faults(self, text: Callable[[int, int], str], cure: str) -> Iterator[Fault]:
        """Yield a fault for each row that waits in a circle with others.

        Args:
            text: row and position → what stands there.
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

    The time is proportional to the number of waits and to the logarithm of the number of rows.

    Args:
        lengths: row → how many positions it has.
        waits: row → its waits, in order.
        clock: row and position → when the row is free again after it. With a clock, the row that
            is free first goes on by one position; without, a row goes on until it must wait.
    """
    # row → how many of its positions, and how many of its waits, are behind it
    passed, done, free = [0] * len(lengths), [0] * len(lengths), [0.0] * len(lengths)
    sleepers: list[list[tuple[int, int]]] = [[] for _ in lengths]  # heaps of (position, waiter)
    ready = [(0.0, row) for row in range(len(lengths))]
    turns: list[Turn] = []
    while ready:
        _, row = heapq.heappop(ready)
        due, number, end = waits[row], done[row], lengths[row]
        while number < len(due):
            position, other, on = due[number]
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
        elif number < len(due) and other != row:
            heapq.heappush(sleepers[other], (on, row))
    stuck = {row: due[done[row]] for row, due in enumerate(waits) if done[row] < len(due)}
    return Walked(turns, stuck)


def waits_of(program: Program) -> list[list[Wait]]:
    """Device → what its instructions wait for in one window, in order.

    A receive waits for its send, a barrier or a pause for all instructions before
    it on the other devices, and an instruction of a stream for its events. What an earlier window
    has sent or recorded is there already; what never comes is waited for for ever.
    """
    lists = program.lists
    waits: list[list[Wait]] = [[] for _ in lists]
    sent: dict[Buffer, Place] = {}
    arrivals: list[tuple[int, int, Buffer]] = []
    met: dict[type, list[list[int]]] = {
        kind: [[] for _ in lists] for kind in (ins.Barrier, ins.Pause)
    }
    for device, instructions in enumerate(lists):
        for position, x in enumerate(instructions):
            if isinstance(x, ins.Send):
                sent.setdefault(x.buffer, Place(device, position))
            elif isinstance(x, ins.Receive):
                arrivals.append((device, position, x.buffer))
            elif isinstance(x, ins.Meeting):
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
    for device_waits in waits:
        device_waits.sort()
    return waits


def _add_meeting(waits: list[list[Wait]], places: Sequence[int | None]) -> None:
    """Let all devices meet at these places, and wait for ever if one of them has none."""
    for device, here in enumerate(places):
        if here is not None and None in places:
            waits[device].append((here, device, here))
        elif here is not None:
            waits[device] += [(here, other, at - 1) for other, at in enumerate(places) if at]


def key_index(schedule: Schedule, task: Task, device: int) -> int | None:
    """The micro-batch in a task's ``Key``; for an A on a copy, the copy's device instead."""
    i, stage = task.microbatch, task.stage
    if task.kind != "A" or stage is None or not 0 <= stage < len(schedule.copies):
        return i
    return device if device in schedule.copies[stage] else i


def needs_of(schedule: Schedule) -> Callable[[Key], list[Key]]:
    """Return a function: task → the tasks of its batch that come before it, if they exist."""
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
    before_it, after_it = schedule.beside
    beside = {-1: before_it, 0: {stage: (stage,) for stage in before_it}, 1: after_it}
    copies = schedule.working or ((),) * schedule.stages
    # stage → each of its devices, None for its own → the micro-batches that it computes
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
                (before, i if per_microbatch else None, at)
                for before, there, per_microbatch in near[letter]
                for at in beside[there][stage]
            ]
        keys: list[Key] = [
            (before, j, stage)
            for before, _, per_microbatch in near[letter]
            for j in (every if per_microbatch else parts[stage])
        ]
        # gradients are added in order, so on each device the last micro-batch stands for all
        keys += [
            (before, max(added, default=0) if KINDS[before].per_microbatch else device, s)
            for before in gathers[letter]
            for s, devices in enumerate(parts)
            for device, indices in devices.items()
            for added in [[i for i in indices if before == "I" or (i, s) not in schedule.frozen]]
        ]
        return keys

    return needs


def turns_of(program: Program) -> tuple[Turn, ...]:
    """Return the turns in which one thread can run, or launch, a window of all devices.

    Events are recorded before they are waited for, and values sent before they are received. A
    barrier or a pause runs on all devices, one right after another. Of the devices that can go on,
    the one whose computations are furthest behind goes next, by the usual times of tasks: so each
    device has work early, however many share the thread.

    Raises:
        InputError: the program gets stuck.
    """
    lists = program.lists
    launches = program.launches or [[Launch()] * len(row) for row in lists]
    free: defaultdict[tuple[int, str], float] = defaultdict(float)
    ends: dict[int | Buffer, float] = {}

    def clock(device: int, position: int) -> float:
        x, launch = lists[device][position], launches[device][position]
        stream = device, launch.stream
        awaited = [ends[event.number] for event in launch.waits if not event.batch]
        if isinstance(x, ins.Receive):
            awaited.append(ends.pop(x.buffer, 0.0))
        end = free[stream] = max(free[stream], *awaited, 0.0) + usual_cost(x.letter)
        if isinstance(x, ins.Send):
            ends[x.buffer] = end
        if launch.record is not None:
            ends[launch.record.number] = end
        return free[device, COMPUTE]

    waits = waits_of(program)
    for device_waits, more in zip(waits, _in_one_thread(program), strict=True):
        device_waits += more
        device_waits.sort()
    walked = walk([len(row) for row in lists], waits, clock)
    if walked.stuck:
        raise InputError(f"program {program.name!r} gets stuck; Program.verify() tells where")
    return tuple(walked.turns)


def _in_one_thread(program: Program) -> list[list[Wait]]:
    """Device → further waits of its instructions where one thread runs them one by one: no device
    goes on from a meeting before all have reached it."""
    waits: list[list[Wait]] = [[] for _ in program.lists]
    meetings = [
        [at for at, x in enumerate(row) if isinstance(x, ins.Meeting)] for row in program.lists
    ]
    for places in zip(*meetings, strict=False):
        for device, here in enumerate(places):
            waits[device] += [(here + 1, d, at) for d, at in enumerate(places) if d != device]
    return waits
