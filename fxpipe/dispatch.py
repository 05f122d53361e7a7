"""The order in which one host thread can launch the lists of all devices."""

from __future__ import annotations

import heapq
from collections import defaultdict

from fxpipe.errors import InputError
from fxpipe.instruction import (
    Barrier,
    Instruction,
    Pause,
    Pop,
    Receive,
    Send,
    Stash,
)
from fxpipe.program import COMPUTE, Buffer, Program, letter_of
from fxpipe.task import KINDS


def dispatch_order(program: Program) -> tuple[int, ...]:
    """The device of each launch of one window, so that none has to wait for a later one.

    An event is recorded before it is waited for, and a value sent before it is received; a
    barrier or a pause is launched on all devices, one right after another. Of the devices that
    can go on it is the turn of the one whose computations are furthest behind, if each takes the
    time of its kind: so each has work early, however many share the thread. What an earlier
    window has recorded and sent is there already.

    Raises:
        InputError: the program has no launches, or gets stuck.
    """
    if len(program.launches) != program.devices:
        raise InputError(
            f"program {program.name!r} has no launches to order; run it through streams first"
        )
    return _Walk(program).run()


class _Walk:
    """All lists on their way.

    Attributes:
        order: what is launched already.
    """

    def __init__(self, program: Program) -> None:
        self.order: list[int] = []
        self._program = program
        self._at = [0] * program.devices
        self._free: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._recorded: dict[int, float] = {}
        self._unsent = {
            x.buffer for own in program.lists for x in own if isinstance(x, Send | Stash)
        }
        self._waiting: defaultdict[int | Buffer, list[int]] = defaultdict(list)
        self._ready = [(0.0, device) for device in range(program.devices)]
        self._met: list[int] = []

    def run(self) -> tuple[int, ...]:
        """Launch all lists to their ends."""
        lists = self._program.lists
        while self._ready:
            _, device = heapq.heappop(self._ready)
            if self._at[device] == len(lists[device]):
                continue
            missing = self._missing(device)
            if missing is not None:
                self._waiting[missing].append(device)
            elif isinstance(lists[device][self._at[device]], Barrier | Pause):
                self._meet(device)
            else:
                self._launch(device)
        if any(at < len(own) for at, own in zip(self._at, lists, strict=True)):
            raise InputError(
                f"program {self._program.name!r} gets stuck; Program.verify() tells where"
            )
        return tuple(self.order)

    def _missing(self, device: int) -> int | Buffer | None:
        """The event or the value that a device's next launch has to wait for."""
        at = self._at[device]
        for event in self._program.launches[device][at].waits:
            if not event.batch and event.number not in self._recorded:
                return event.number
        x = self._program.lists[device][at]
        return x.buffer if isinstance(x, Receive | Pop) and x.buffer in self._unsent else None

    def _meet(self, device: int) -> None:
        self._met.append(device)
        if len(self._met) < self._program.devices:
            return
        together, self._met = sorted(self._met), []
        for each in together:
            self._launch(each)

    def _launch(self, device: int) -> None:
        at = self._at[device]
        x, launch = self._program.lists[device][at], self._program.launches[device][at]
        stream = device, launch.stream
        waits = [self._recorded[e.number] for e in launch.waits if not e.batch]
        end = self._free[stream] = max([self._free[stream], *waits]) + usual_cost(x)
        self.order.append(device)
        self._at[device] = at + 1
        self._wake(device)
        if launch.record is not None:
            self._recorded[launch.record.number] = end
            for waiter in self._waiting.pop(launch.record.number, ()):
                self._wake(waiter)
        if isinstance(x, Send | Stash):
            self._unsent.discard(x.buffer)
            for waiter in self._waiting.pop(x.buffer, ()):
                self._wake(waiter)

    def _wake(self, device: int) -> None:
        heapq.heappush(self._ready, (self._free[device, COMPUTE], device))


def usual_cost(instruction: Instruction) -> float:
    """The time of the kind of task that an instruction runs; 0 for one that computes nothing."""
    letter = letter_of(instruction)
    if letter is None:
        return 0.0
    return KINDS[letter].cost if letter in KINDS else 1.0
