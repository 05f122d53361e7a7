"""Insert the instructions that move values between devices, and from and to the caller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Buffer
from fxpipe.passes.runner import comes_after
from fxpipe.torchtools.state import without_collection


@without_collection()
def communicate(program: Program) -> Program:
    """Program → Program: every value reaches the device that reads it.

    Before, with edges ``act z 1->2``, ``skip h 0->2`` and ``out loss 2->host``::

        device 2
          forward   s2[0] v0 keep
          backward  s2[0] v0

    after::

        device 2
          recv      skip:h:0->2[0]
          recv      act:z:1->2[0]
          forward   s2[0] v0 keep
          output    out:loss:2->host[0]
          load      grad:loss:host->2[0]
          backward  s2[0] v0
          send      grad:h:2->0[0]
          send      grad:z:2->1[0]

    A value leaves right after it is made and arrives right before its first use. Nothing moves
    between two stages of one device. A value that skips stages goes straight to the stage that uses
    it, and its gradient straight back. Inputs are loaded and outputs handed over, and so are
    their gradients if their edges carry one.

    Values from one device to another arrive in the order in which they leave. A device that uses
    them in another order receives the earlier ones first. That adds no waiting: what left earlier
    is there already.

    Raises:
        InputError: the program already does more than compute.
    """
    comes_after(program, "communicate", "lower")
    mail = _Mail(program)
    sending = [list(mail.send(device, list_)) for device, list_ in enumerate(program.lists)]
    lists = tuple(tuple(mail.receive(device, list_)) for device, list_ in enumerate(sending))
    return replace(program, lists=lists, passes=(*program.passes, "communicate"))


class _Mail:
    """The values in flight between devices.

    Where batches overlap, the program is a window that repeats, and so are the queues: a value that
    left in an earlier window has a place before the start of this window's queue.

    Attributes:
        program: the program that only computes.
        queues: (from, to) → the values in the order in which they leave, in one window.
        places: value, without its batch → its index in its queue, and its batch there.
        taken: (from, to) → how many values have been received, counted from this window's start.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.queues: defaultdict[tuple[int, int], list[Buffer]] = defaultdict(list)
        self.places: dict[tuple[object, ...], tuple[int, int]] = {}
        self.taken: dict[tuple[int, int], int] = {}

    def send(
        self, device: int, instructions: Iterable[ins.Instruction]
    ) -> Iterator[ins.Instruction]:
        """Yield a device's instructions, each followed by what sends the values that it makes."""
        for instruction in instructions:
            yield instruction
            for buffer in instruction.makes(self.program):
                if buffer.target == HOST:
                    yield ins.Output(buffer)
                elif (home := self.program.ends_of(buffer)[1]) != device:
                    queue = self.queues[device, home]
                    self.places[buffer[:5]] = len(queue), buffer.batch
                    queue.append(buffer)
                    yield (ins.Stash if buffer.kind == "skip" else ins.Send)(buffer)

    def receive(
        self, device: int, instructions: Sequence[ins.Instruction]
    ) -> Iterator[ins.Instruction]:
        """Yield a device's instructions, each after what receives the values that it reads."""
        loaded: dict[object, int] = {}
        if self.program.depth:
            self._start(device, instructions, loaded)
        for instruction in instructions:
            for buffer in instruction.uses(self.program):
                if buffer.source == HOST:
                    if loaded.setdefault(buffer[:5], buffer.batch) == buffer.batch:
                        loaded[buffer[:5]] = 1  # a recompute does not load it again
                        yield ins.Load(buffer)
                elif (home := self.program.ends_of(buffer)[0]) != device:
                    yield from self._take((home, device), buffer)
            yield instruction

    def _start(
        self, device: int, instructions: Iterable[ins.Instruction], loaded: dict[object, int]
    ) -> None:
        """Note what the windows before this one have received and loaded.

        Receives go on right after the last one there, and what the caller gives is loaded where its
        batch comes first.
        """
        for instruction in instructions:
            for buffer in instruction.uses(self.program):
                if buffer.source == HOST:
                    loaded[buffer[:5]] = max(loaded.get(buffer[:5], buffer.batch), buffer.batch)
                elif (home := self.program.ends_of(buffer)[0]) != device:
                    pair = home, device
                    end = self._place(pair, buffer) + 1 - len(self.queues[pair])
                    self.taken[pair] = max(self.taken.get(pair, end), end)

    def _place(self, pair: tuple[int, int], buffer: Buffer) -> int:
        """A value's place in its queue, from this window's start on; −1 if nothing sends it."""
        if buffer[:5] not in self.places:
            return -1
        index, batch = self.places[buffer[:5]]
        return index - (batch - buffer.batch) * len(self.queues[pair])

    def _take(self, pair: tuple[int, int], buffer: Buffer) -> Iterator[ins.Instruction]:
        """Receive up to a value; nothing if it has been received, or if nothing ever sends it."""
        first, end = self.taken.get(pair, 0), self._place(pair, buffer) + 1
        queue = self.queues[pair]
        for place in range(first, end):
            windows, index = divmod(place, len(queue))
            arrival = queue[index]
            if windows:
                arrival = arrival._replace(batch=arrival.batch + windows)
            yield (ins.Pop if arrival.kind == "skip" else ins.Receive)(arrival)
        self.taken[pair] = max(first, end)
