"""Values on their way between devices: sends paired, nothing stuck, channels of any size.

A window repeats, yet one run of it shows whether devices get stuck on each other. A value must be
received in the step in which it is sent or in a later one, for a step ends when all devices have
finished their windows. So every wait is for the same step or an earlier one, and a circle of waits
lies within one step. The first steps and the flush leave out whole batches; the instructions that
are left wait for no more than in a full step, and find no more values in flight.

How many values a channel from one device to another must hold, where each stage hands one value to
the next: none for gpipe, naive and inference, whose sends can be rendezvous; 1 for 1f1b, chimera,
zb-h1, zb-h2, v-half, v-min and the schedules without a flush; 2 for zb-v, dualpipe-v and
interleaved-1f1b; 1 to 3 for interleaved-zb and hanayo, with p up to 8; up to m for looped-bfs.
Skips need more, for the values in flight past the stages between.
``fxpipe.verify.program.smallest_channel`` computes it for any program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Wait, waits_of, walk
from fxpipe.verify.run import AbstractRun
from fxpipe.verify.tasks import steps_later

Pair = tuple[int, int]
"""A device, and the one that it sends to."""


class Transit(NamedTuple):
    """A send or a receive of a value: its position, the buffer, and its batch there."""

    position: int
    buffer: Buffer
    batch: int


class Transfers:
    """The values that go from device to device.

    Attributes:
        sent: for each pair of devices the sends, in the order of the list.
        received: the same for the receives.
    """

    def __init__(self, ran: AbstractRun) -> None:
        self.ran = ran
        self.sent: dict[Pair, list[Transit]] = defaultdict(list)
        self.received: dict[Pair, list[Transit]] = defaultdict(list)
        program = ran.program
        for device, life in enumerate(ran.lives):
            for position in sorted(p for p, x in life if isinstance(x, ins.Send | ins.Receive)):
                x = program.lists[device][position]
                assert isinstance(x, ins.Send | ins.Receive)
                moves = self.sent if isinstance(x, ins.Send) else self.received
                buffer = x.buffer
                transit = Transit(position, buffer._replace(batch=0), buffer.batch)
                moves[program.ends_of(buffer)].append(transit)

    def paired(self) -> Iterator[Fault]:
        """Check that each value is sent and received once, in the same order on both devices."""
        for pair in sorted(self.sent.keys() | self.received.keys()):
            sent, received = self.sent.get(pair, []), self.received.get(pair, [])
            seen: set[Buffer] = set()
            for move in sent:  # a value received twice is also made twice, which the run reports
                if move.buffer in seen:
                    yield self.ran.fault(pair[0], move.position, "it is sent twice", "keep one")
                seen.add(move.buffer)
            here = {move.buffer: move for move in sent}
            there = {move.buffer: move for move in received}
            for buffer, move in here.items():
                if buffer not in there:
                    what = f"device {pair[1]} never receives it"
                    yield self.ran.fault(pair[0], move.position, what, "receive it there")
            for buffer, move in there.items():
                if buffer not in here:
                    what = f"device {pair[0]} never sends it"
                    yield self.ran.fault(pair[1], move.position, what, "send it there")
            leaving = [move for buffer, move in here.items() if buffer in there]
            arriving = [move for buffer, move in there.items() if buffer in here]
            yield from self._crossed(pair, leaving, arriving)

    def _crossed(
        self, pair: tuple[int, int], leaving: list[Transit], arriving: list[Transit]
    ) -> Iterator[Fault]:
        """Report the first value that is received in another order than it is sent.

        Both orders repeat in every step. So the k-th of n sends, if it is for batch b, is number
        k − b · n for its batch. Receives in the order of the sends find consecutive numbers.
        """
        count = len(leaving)
        index = {move.buffer: (k, move.batch) for k, move in enumerate(leaving)}
        numbers = []
        for move in arriving:
            k, batch = index[move.buffer]
            numbers.append(k + (move.batch - batch) * count)
        first = min(numbers, default=0)
        for number, move in zip(range(first, first + count), arriving, strict=True):
            if numbers[number - first] != number:
                left = leaving[number % count]
                yield self.ran.fault(
                    pair[1],
                    move.position,
                    f"device {pair[0]} sends {left.buffer} before it, at position {left.position}",
                    "receive in the order of the sends",
                )
                return

    def stuck(self, channel: int | None) -> Iterator[Fault]:
        """Check that the lists run to their ends.

        Args:
            channel: how many values may be in flight from one device to another before a send waits
                for room. With 0 a send waits for its receive, with None it never waits.
        """
        # waits for the device itself, in the wrong order or for ever, are reported by other rules
        waits = [
            [wait for wait in device_waits if wait[1] != device]
            for device, device_waits in enumerate(waits_of(self.ran.program))
        ]
        for pair, received in self.received.items():
            sent = self.sent.get(pair, [])
            yield from self._too_late(pair, sent, received)
            if channel is not None:
                yield from self._sends(pair, sent, received, channel, waits)
        for device_waits in waits:
            device_waits.sort()
        cure = "send earlier or receive later on one of the devices of the circle"
        if channel is not None:
            cure += f", or let more than {channel} values be on their way between two devices"
        lengths = [len(row) for row in self.ran.program.lists]
        yield from walk(lengths, waits).faults(self.ran.text, cure)

    def _too_late(
        self, pair: tuple[int, int], sent: list[Transit], received: list[Transit]
    ) -> Iterator[Fault]:
        """Check that a value is sent in the step in which it is received, or earlier."""
        source, device = pair
        sends = {move.buffer: move for move in reversed(sent)}
        for move in received:
            send = sends.get(move.buffer)
            if send is not None and send.batch < move.batch:
                yield self.ran.fault(
                    device,
                    move.position,
                    f"device {source} sends it only {steps_later(move.batch - send.batch)}, at "
                    f"position {send.position}",
                    "send it in the same step, or receive it in a later one",
                )

    def _sends(
        self,
        pair: tuple[int, int],
        sent: list[Transit],
        received: list[Transit],
        channel: int,
        waits: list[list[Wait]],
    ) -> Iterator[Fault]:
        """Add the waits of sends for room on a channel; report those for a later step.

        A send waits for the receive of the value that was sent ``channel`` sends before it. Without
        room it waits until its own receive is next.
        """
        device, target = pair
        receives = {move.buffer: move for move in reversed(received)}
        count = len(sent)
        for k, move in enumerate(sent):
            windows, index = divmod(k - channel, count)
            receive = receives.get(sent[index].buffer)
            if receive is None:
                continue  # reported as never received
            steps = windows + sent[index].batch - receive.batch
            position = receive.position - (channel == 0)
            if steps == 0 and position >= 0:
                waits[device].append((move.position, target, position))
            elif steps > 0:
                yield self.ran.fault(
                    device,
                    move.position,
                    f"it waits for room, which device {target} makes only {steps_later(steps)}, at "
                    f"position {receive.position}",
                    f"receive earlier, or let more than {channel} values be on their way",
                )
