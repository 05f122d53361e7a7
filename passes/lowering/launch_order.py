"""The order in which one host can launch the instructions of all devices, arrivals early.

It has a walk of its own, besides that of ``fxpipe.ir.walk``, whose rows stay as they are: here an
arrival that nothing can be launched before is put off behind the next computation, and how often
that is needed shows only on the way.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Buffer
from fxpipe.ir.walk import usual_cost


class Launched(NamedTuple):
    """An instruction in its place.

    Attributes:
        rank: its index in the order over all devices.
        start: when it starts, if each instruction took its kind's usual time and copies no time.
        instruction: the instruction.
    """

    rank: int
    start: float
    instruction: ins.Instruction


def source_of(program: Program, arrival: ins.Arrival) -> int:
    """The device that a value comes from, or HOST."""
    return HOST if isinstance(arrival, ins.Load) else program.origin(arrival)


def launch_order(program: Program, ahead: int) -> list[list[Launched]]:
    """Device → its list with the arrivals moved up, and the order over all lists.

    An arrival comes before so many computations that precede its own place, or as many as it can:
    not across a barrier or a pause, not before an earlier one from the same device, and not where
    launching would get stuck, because what is sent depends on the computation that it would move
    across. Where batches overlap it is the order within one window, in which what an earlier one
    sent is there already. It takes time in proportion to the number of instructions, and to the
    logarithm of that of devices.

    Raises:
        InputError: the program gets stuck as it is.
    """
    return _Walk(program, ahead).run()


class _Pending(NamedTuple):
    """An instruction to launch, and the stop before which it stands at the latest."""

    latest: int
    instruction: ins.Instruction


class _Device:
    """One device's list in segments: what stands before each of its stops, and the stop.

    Stops are all instructions that do not move values.
    """

    def __init__(self, instructions: tuple[ins.Instruction, ...], ahead: int) -> None:
        stops = [at for at, x in enumerate(instructions) if not isinstance(x, ins.Move)]
        self.now = 0.0
        self.queue: deque[_Pending] = deque()
        self.segment = -1
        self._stops = [instructions[at] for at in stops]
        self._rest: list[list[_Pending]] = [[] for _ in range(len(stops) + 1)]
        self._arrivals: list[list[_Pending]] = [[] for _ in range(len(stops) + 1)]
        since = 0  # the first stop behind the last meeting
        for at, x in enumerate(instructions):
            stop = bisect_right(stops, at)
            if isinstance(x, ins.Meeting):
                since = stop
            if isinstance(x, ins.Arrival):
                self._arrivals[max(stop - ahead, since)].append(_Pending(stop, x))
            elif isinstance(x, ins.Move):
                self._rest[stop].append(_Pending(stop, x))

    def head(self) -> ins.Instruction | None:
        """What it launches next, or None at its end."""
        if not self.queue and self.segment < len(self._stops):
            self.segment += 1
            self.queue.extend(self._rest[self.segment])
            self.queue.extend(self._arrivals[self.segment])
            if self.segment < len(self._stops):
                self.queue.append(_Pending(self.segment, self._stops[self.segment]))
        return self.queue[0].instruction if self.queue else None

    def put_off(self, program: Program) -> bool:
        """Whether the arrival that it waits at can stand behind the next stop; then it does.

        So do those behind it from the same device.
        """
        if not self.queue or self.queue[0].latest == self.segment:
            return False
        first = self.queue[0].instruction
        assert isinstance(first, ins.Arrival)
        source = source_of(program, first)
        late = [
            pending
            for pending in self.queue
            if isinstance(pending.instruction, ins.Arrival)
            and source_of(program, pending.instruction) == source
        ]
        self.queue = deque(pending for pending in self.queue if pending not in late)
        self._arrivals[self.segment + 1][:0] = late
        return True


class _Walk:
    """Walks through the lists of all devices; the device that is furthest behind goes first."""

    def __init__(self, program: Program, ahead: int) -> None:
        self._program = program
        self._devices = [_Device(own, ahead) for own in program.lists]
        self._unsent = {
            x.buffer for own in program.lists for x in own if isinstance(x, ins.Sending)
        }
        self._sent: dict[Buffer, float] = {}
        self._waiting: dict[Buffer, int] = {}
        self._gathered: set[int] = set()
        self._ready = [(0.0, device) for device in range(program.devices)]
        self._launched: list[list[Launched]] = [[] for _ in program.lists]
        self._rank = 0

    def run(self) -> list[list[Launched]]:
        """Launch all lists to their ends."""
        while self._ready or self._put_off():
            _, device = heapq.heappop(self._ready)
            instruction = self._devices[device].head()
            if instruction is not None and self._launch(device, instruction):
                heapq.heappush(self._ready, (self._devices[device].now, device))
        return self._launched

    def _put_off(self) -> bool:
        """Let one device go on that waits for what was moved up. False when all are done."""
        left = [(device.now, d) for d, device in enumerate(self._devices) if device.head()]
        for now, d in sorted(left):
            waited = self._devices[d].head()
            if self._devices[d].put_off(self._program):
                assert isinstance(waited, ins.Receiving)
                del self._waiting[waited.buffer]
                heapq.heappush(self._ready, (now, d))
                return True
        if left:
            raise InputError(
                f"program {self._program.name!r} gets stuck; Program.verify() tells where"
            )
        return False

    def _launch(self, d: int, instruction: ins.Instruction) -> bool:
        """Launch an instruction. False where it has to wait."""
        match instruction:
            case ins.Receive(buffer) | ins.Pop(buffer) if buffer in self._unsent:
                self._waiting[buffer] = d
                return False
            case ins.Barrier() | ins.Pause():
                self._gathered.add(d)
                if len(self._gathered) == len(self._devices):
                    together = max(device.now for device in self._devices)
                    for each, device in enumerate(self._devices):
                        device.now = together
                        self._pass(each, instruction)
                        heapq.heappush(self._ready, (together, each))
                    self._gathered.clear()
                return False
            case ins.Send(buffer) | ins.Stash(buffer):
                self._unsent.discard(buffer)
                self._sent[buffer] = self._devices[d].now
                if buffer in self._waiting:
                    receiver = self._waiting.pop(buffer)
                    heapq.heappush(self._ready, (self._devices[receiver].now, receiver))
        self._pass(d, instruction)
        return True

    def _pass(self, d: int, instruction: ins.Instruction) -> None:
        device = self._devices[d]
        there = [self._sent.get(buffer, 0.0) for buffer in self._program.reads(instruction)]
        start = device.now
        if not isinstance(instruction, ins.Move):
            start = max([start, *there])
        self._launched[d].append(Launched(self._rank, start, instruction))
        self._rank += 1
        device.queue.popleft()
        device.now = start + usual_cost(instruction)
