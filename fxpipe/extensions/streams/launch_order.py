"""Find an order in which one host can launch the instructions of all devices, arrivals early.

``fxpipe.ir.walk`` does not fit here: it leaves rows as they are, and this walk changes them. When
everything waits for arrivals that were moved up too far, it puts one behind the next computation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import usual_cost
from fxpipe.ir.value import HOST, Buffer


class Ordered(NamedTuple):
    """An instruction in its place.

    Attributes:
        rank: its index in the order over all devices.
        start: when it starts if each instruction takes its kind's usual time and copies take none.
        instruction: the instruction.
        uses: the buffers that it uses.
    """

    rank: int
    start: float
    instruction: ins.Instruction
    uses: tuple[Buffer, ...]


def arrivals(source: int) -> str:
    """The stream on which values from a device arrive, such as ``in0``; ``in`` for the caller."""
    return "in" if source == HOST else f"in{source}"


def source_of(program: Program, arrival: ins.Arrival) -> int:
    """The device that a value arrives from, or HOST."""
    return HOST if isinstance(arrival, ins.Load) else program.origin(arrival)


def launch_order(program: Program, ahead: int) -> list[list[Ordered]]:
    """Device → its list with the arrivals moved up, in an order over all lists.

    An arrival moves up across ``ahead`` computations, or as many as possible. It does not move
    across a barrier or a pause, nor before an earlier arrival from the same device, nor across a
    computation that the value's sender waits for. Where batches overlap, this is the order within
    one window; what earlier windows sent is there already. The time is proportional to the number
    of instructions and the logarithm of the number of devices.

    Raises:
        InputError: the program gets stuck as it is.
    """
    return _Walk(program, ahead).run()


class _Pending(NamedTuple):
    """An instruction to launch, and the last stop before which it may stand."""

    latest: int
    instruction: ins.Instruction


class _Device:
    """One device's list in segments, each with a stop at its end.

    Stops are the instructions that do not move values.
    """

    def __init__(self, instructions: tuple[ins.Instruction, ...], ahead: int) -> None:
        stops = [at for at, x in enumerate(instructions) if not isinstance(x, ins.Move)]
        self.now = 0.0
        self.queue: deque[_Pending] = deque()
        self.segment = -1
        self._stops = [instructions[at] for at in stops]
        self._rest: list[list[_Pending]] = [[] for _ in range(len(stops) + 1)]
        self._arrivals: list[list[_Pending]] = [[] for _ in range(len(stops) + 1)]
        since = 0  # the first stop behind the last barrier or pause
        for at, x in enumerate(instructions):
            stop = bisect_right(stops, at)
            if isinstance(x, ins.Meeting):
                since = stop
            if isinstance(x, ins.Arrival):
                self._arrivals[max(stop - ahead, since)].append(_Pending(stop, x))
            elif isinstance(x, ins.Move):
                self._rest[stop].append(_Pending(stop, x))

    def head(self) -> ins.Instruction | None:
        """The next instruction to launch; None at the end."""
        if not self.queue and self.segment < len(self._stops):
            self.segment += 1
            self.queue.extend(self._rest[self.segment])
            self.queue.extend(self._arrivals[self.segment])
            if self.segment < len(self._stops):
                self.queue.append(_Pending(self.segment, self._stops[self.segment]))
        return self.queue[0].instruction if self.queue else None

    def put_off(self, program: Program) -> bool:
        """Move the next arrival, with those behind it from the same device, behind the next stop;
        return whether that was possible."""
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
    """Walks through the lists of all devices; the device with the earliest time goes first."""

    def __init__(self, program: Program, ahead: int) -> None:
        self._program = program
        self._devices = [_Device(list_, ahead) for list_ in program.lists]
        self._unsent = {
            x.buffer for list_ in program.lists for x in list_ if isinstance(x, ins.Send)
        }
        self._sent: dict[Buffer, float] = {}
        self._waiting: dict[Buffer, int] = {}
        # since when a device waits for a value; one that has come meanwhile is not in ``_waiting``
        self._stuck: list[tuple[float, int, Buffer]] = []
        self._gathered: set[int] = set()
        self._ready = [(0.0, device) for device in range(program.devices)]
        self._launched: list[list[Ordered]] = [[] for _ in program.lists]
        self._rank = 0

    def run(self) -> list[list[Ordered]]:
        """Launch all lists to their ends."""
        while self._ready or self._put_off():
            _, device = heapq.heappop(self._ready)
            instruction = self._devices[device].head()
            while instruction is not None and self._launch(device, instruction):
                _, device = heapq.heappushpop(self._ready, (self._devices[device].now, device))
                instruction = self._devices[device].head()
        return self._launched

    def _put_off(self) -> bool:
        """Put off an arrival that a device is stuck at; return False when all devices are done."""
        while self._stuck:
            now, d, waited = heapq.heappop(self._stuck)
            if self._waiting.get(waited) == d and self._devices[d].put_off(self._program):
                del self._waiting[waited]
                heapq.heappush(self._ready, (now, d))
                return True
        if any(device.head() for device in self._devices):
            raise InputError(
                f"program {self._program.name!r} gets stuck; Program.verify() tells where"
            )
        return False

    def _launch(self, d: int, instruction: ins.Instruction) -> bool:
        """Launch an instruction; return False if the device has to wait for another one."""
        match instruction:
            case ins.Receive(buffer) if buffer in self._unsent:
                self._waiting[buffer] = d
                heapq.heappush(self._stuck, (self._devices[d].now, d, buffer))
                return False
            case ins.Barrier() | ins.Pause():
                self._gathered.add(d)
                if len(self._gathered) == len(self._devices):
                    together = max(device.now for device in self._devices)
                    for number, device in enumerate(self._devices):
                        device.now = together
                        self._pass(number, instruction)
                        heapq.heappush(self._ready, (together, number))
                    self._gathered.clear()
                return False
            case ins.Send(buffer):
                self._unsent.discard(buffer)
                self._sent[buffer] = self._devices[d].now
                if buffer in self._waiting:
                    receiver = self._waiting.pop(buffer)
                    heapq.heappush(self._ready, (self._devices[receiver].now, receiver))
        self._pass(d, instruction)
        return True

    def _pass(self, d: int, instruction: ins.Instruction) -> None:
        device = self._devices[d]
        start, uses = device.now, instruction.uses(self._program)
        if not isinstance(instruction, ins.Move):
            for buffer in uses:
                start = max(start, self._sent.get(buffer, 0.0))
        self._launched[d].append(Ordered(self._rank, start, instruction, uses))
        self._rank += 1
        device.queue.popleft()
        device.now = start + usual_cost(instruction.letter)
