"""Whether a program's devices get stuck on each other, over channels of any size.

A window repeats, and yet it is enough to run it once. Values are received in the step in which
they are sent or in a later one: a receive of what comes only in a later step is refused, for a
step ends when all devices are through their windows. So every wait is for the same step or an
earlier one, and a circle of waits lies within one step. Steps at the begin and in the flush
leave out whole batches: what is left waits for no more than it did, and on channels that hold
less than it did.

What the library's schedules need where each stage hands one value to the next, from one device to
another: nothing for gpipe, naive and inference, which run over rendezvous as well; room for 1 value
for 1f1b, those without a flush, zb-h1, zb-h2, v-half and v-min; for 2 with zb-v, dualpipe-v and
interleaved-1f1b; for up to m with looped-bfs. Skips add what is on its way over the stages between.
``smallest_channel`` tells it for any program.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import Fault, InputError
from fxpipe.ir.program import Program
from fxpipe.ir.walk import Wait, waits_of, walk
from fxpipe.text.instruction import print_instruction
from fxpipe.verify.facts import Facts, Move


@dataclass(frozen=True)
class Unstuck:
    """The rule: the lists run to their ends.

    Attributes:
        channel: how many values may be on their way from one device to another: a send waits
            until there is room for its own. With 0 it waits until the receive is reached. None
            is for any number.
    """

    channel: int | None = None

    def __post_init__(self) -> None:
        if self.channel is not None and self.channel < 0:
            raise InputError(f"channel is {self.channel}; give at least 0, or None for no bound")

    def __call__(self, facts: Facts) -> Iterator[Fault]:
        lists = facts.program.lists
        # what waits for ever, and what is out of order on one device, other rules report
        waits = [
            [wait for wait in own if wait[1] != device]
            for device, own in enumerate(waits_of(facts.program))
        ]
        for pair, received in facts.received.items():
            sent = facts.sent.get(pair, [])
            yield from _too_late(facts, pair, sent, received)
            if self.channel is not None:
                yield from _sends(facts, pair, sent, received, self.channel, waits)
        for own in waits:
            own.sort()
        cure = "send earlier or receive later on one of the devices of the circle"
        if self.channel is not None:
            cure += f", or let more than {self.channel} values be on their way between two devices"
        yield from walk(list(map(len, lists)), waits).faults(
            lambda device, position: print_instruction(lists[device][position]), cure
        )


def smallest_channel(program: Program) -> int:
    """How many values each channel must hold, so that no device gets stuck.

    A greater number is never worse: a send then waits for an earlier receive.

    Raises:
        VerificationError: the program is wrong, or gets stuck on channels of any size.
    """
    # here, as the rules import this module
    from fxpipe.verify.program import verify_program

    verify_program(program)
    facts = Facts(program)
    most = 1
    while _stuck(facts, most):
        most *= 2
    return bisect(range(most), False, key=lambda channel: not _stuck(facts, channel))


def _stuck(facts: Facts, channel: int) -> bool:
    return any(Unstuck(channel)(facts))


def _too_late(
    facts: Facts, pair: tuple[int, int], sent: list[Move], received: list[Move]
) -> Iterator[Fault]:
    """A value is sent in the step in which it is received, or before."""
    source, device = pair
    sends = {move.buffer: move for move in reversed(sent)}
    for move in received:
        send = sends.get(move.buffer)
        if send is not None and send.batch < move.batch:
            yield facts.fault(
                device,
                move.position,
                f"device {source} sends it only {_later(move.batch - send.batch)}, at position "
                f"{send.position}",
                "send it in the same step, or receive it in a later one",
            )


def _sends(
    facts: Facts,
    pair: tuple[int, int],
    sent: list[Move],
    received: list[Move],
    channel: int,
    waits: list[list[Wait]],
) -> Iterator[Fault]:
    """Sends wait for the receive that makes room: of the value as many sends ago as there is room.

    Without room it is the value's own, which must be next.
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
            yield facts.fault(
                device,
                move.position,
                f"it waits for room, which device {target} makes only {_later(steps)}, at position "
                f"{receive.position}",
                f"receive earlier, or let more than {channel} values be on their way",
            )


def _later(steps: int) -> str:
    return "in the next step" if steps == 1 else f"{steps} steps later"
