"""The order in which one thread can run, or launch, the lists of all devices."""

from __future__ import annotations

import heapq
from collections import defaultdict

from fxpipe.errors import InputError
from fxpipe.ir.instruction import (
    Barrier,
    Forward,
    Instruction,
    Pause,
    Pop,
    Receive,
    Run,
    Send,
    Stash,
    Update,
)
from fxpipe.ir.program import COMPUTE, Buffer, Launch, Program, letter_of
from fxpipe.ir.task import KINDS


def dispatch_order(program: Program) -> tuple[int, ...]:
    """The device of each instruction of one window, so that none has to wait for a later one.

    An event is recorded before it is waited for, and a value sent before it is received; a
    barrier or a pause comes on all devices, one right after another. Of the devices that can go
    on it is the turn of the one whose computations are furthest behind, if each takes the time of
    its kind: so each has work early, however many share the thread. What an earlier window has
    recorded and sent is there already.

    Raises:
        InputError: the program gets stuck.
    """
    return _Walk(program).run()


class _Walk:
    """All lists on their way.

    Attributes:
        order: what has had its turn already.
    """

    def __init__(self, program: Program) -> None:
        self.order: list[int] = []
        self._program = program
        # a device that does one instruction after another has no launches
        self._launches = program.launches or [[Launch()] * len(own) for own in program.lists]
        self._at = [0] * program.devices
        self._free: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._recorded: dict[int, float] = {}
        self._unsent = {
            x.buffer for own in program.lists for x in own if isinstance(x, Send | Stash)
        }
        self._sent: dict[Buffer, float] = {}
        self._behind = _awaited(program)
        self._waiting: defaultdict[int | Buffer | Update, list[int]] = defaultdict(list)
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

    def _missing(self, device: int) -> int | Buffer | Update | None:
        """The event, the value or the update that a device's next instruction has to wait for."""
        at = self._at[device]
        for event in self._launches[device][at].waits:
            if not event.batch and event.number not in self._recorded:
                return event.number
        x = self._program.lists[device][at]
        if isinstance(x, Update):
            return next((each for each in self._behind[x] if each in self._behind), None)
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
        x, launch = self._program.lists[device][at], self._launches[device][at]
        stream = device, launch.stream
        waits = [self._recorded[e.number] for e in launch.waits if not e.batch]
        if isinstance(x, Receive | Pop):
            waits.append(self._sent.pop(x.buffer, 0.0))
        end = self._free[stream] = max([self._free[stream], *waits]) + usual_cost(x)
        self.order.append(device)
        self._at[device] = at + 1
        self._wake(device)
        if launch.record is not None:
            self._recorded[launch.record.number] = end
            for waiter in self._waiting.pop(launch.record.number, ()):
                self._wake(waiter)
        if isinstance(x, Update):
            del self._behind[x]
            for waiter in self._waiting.pop(x, ()):
                self._wake(waiter)
        if isinstance(x, Send | Stash):
            self._unsent.discard(x.buffer)
            self._sent[x.buffer] = end
            for waiter in self._waiting.pop(x.buffer, ()):
                self._wake(waiter)

    def _wake(self, device: int) -> None:
        heapq.heappush(self._ready, (self._free[device, COMPUTE], device))


def _awaited(program: Program) -> dict[Update, list[Update]]:
    """Update → the updates that it comes after, of ``Versions.awaited``: all stages then have the
    version that a failure would take them back to."""
    every = [x for own in program.lists for x in own]
    updates = [x for x in every if isinstance(x, Update)]
    delay, *others = {-x.version for x in every if isinstance(x, Forward)} or {0}
    alone = len(set(program.placement)) == program.stages
    if not delay or others or not alone or any(isinstance(x, Run) for x in every):
        return {x: [] for x in updates}
    return {x: [y for y in updates if y.writes <= x.writes - delay] for x in updates}


def usual_cost(instruction: Instruction) -> float:
    """The time of the kind of task that an instruction runs; 0 for one that computes nothing."""
    letter = letter_of(instruction)
    if letter is None:
        return 0.0
    return KINDS[letter].cost if letter in KINDS else 1.0
