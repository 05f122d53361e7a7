"""Rules for what moves in a program: reads after writes, sends paired, nothing leaked or stuck.

A window repeats, and yet it is enough to run it once to see whether devices get stuck on each
other. Values are received in the step in which they are sent or in a later one: a receive of what
comes only in a later step is refused, for a step ends when all devices are through their windows.
So every wait is for the same step or an earlier one, and a circle of waits lies within one step.
Steps at the begin and in the flush leave out whole batches: what is left waits for no more than it
did, and on channels that hold less than it did.

What the library's schedules need where each stage hands one value to the next, from one device to
another: nothing for gpipe, naive and inference, which run over rendezvous as well; room for 1 value
for 1f1b, those without a flush, chimera, zb-h1, zb-h2, v-half and v-min; for 2 with zb-v,
dualpipe-v and interleaved-1f1b; for up to m with looped-bfs. Skips add what is on its way over the
stages between.
``fxpipe.verify.program.smallest_channel`` tells it for any program.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.value import HOST, Buffer, forward_buffer, gradient_buffer
from fxpipe.ir.walk import Wait, waits_of, walk
from fxpipe.verify.facts import Facts, Move
from fxpipe.verify.tasks import microbatches_text, steps_later


def lives(facts: Facts) -> Iterator[Fault]:
    """On each device a buffer is made once, then read, then ended at most once.

    Where frees are in place, nothing is left when a batch is through.
    """
    program = facts.program
    freed = "free" in program.passes
    for device, life in enumerate(facts.lives):
        alive: dict[Buffer, bool] = {}
        for position, instruction in life:
            reads = program.reads(instruction)
            for buffer in reads:
                if not alive.get(buffer):
                    yield facts.fault(device, position, *_absent(facts, device, buffer, alive))
            for buffer in program.writes(instruction):
                if buffer in alive:
                    yield facts.fault(device, position, f"{buffer} was made before", "make it once")
                alive[buffer] = True
            for buffer in program.ends(instruction):
                if not alive.get(buffer) and buffer not in reads:
                    yield facts.fault(device, position, *_absent(facts, device, buffer, alive))
                if buffer in alive:
                    alive[buffer] = False
        left = [buffer for buffer, there in alive.items() if there] if freed else []
        for buffer in left:
            yield facts.fault(
                device,
                facts.last_made[device][buffer],
                f"{buffer} is still there when its batch is through",
                "free it after its last use",
            )


def _absent(
    facts: Facts, device: int, buffer: Buffer, alive: dict[Buffer, bool]
) -> tuple[str, str]:
    """Why a buffer is not there, and what to do about it."""
    if buffer in alive:
        return f"{buffer} is freed already", "free it once, after its last use"
    made = facts.last_made[device].get(buffer)
    if made is not None:
        return f"{buffer} is made only at position {made}", "move that before it"
    return f"{buffer} is never made on this device", "load, receive or compute it before"


def paired(facts: Facts) -> Iterator[Fault]:
    """What one device sends another receives, once and in the same order."""
    for pair in sorted(facts.sent.keys() | facts.received.keys()):
        sent, received = facts.sent.get(pair, []), facts.received.get(pair, [])
        seen: set[Buffer] = set()
        for move in sent:  # a value received twice is one made twice, and reported as that
            if move.buffer in seen:
                yield facts.fault(pair[0], move.position, "it is sent twice", "keep one")
            seen.add(move.buffer)
        here = {move.buffer: move for move in sent}
        there = {move.buffer: move for move in received}
        for buffer, move in here.items():
            if buffer not in there:
                what = f"device {pair[1]} never receives it"
                yield facts.fault(pair[0], move.position, what, "receive it there")
        for buffer, move in there.items():
            if buffer not in here:
                what = f"device {pair[0]} never sends it"
                yield facts.fault(pair[1], move.position, what, "send it there")
        leaving = [move for buffer, move in here.items() if buffer in there]
        arriving = [move for buffer, move in there.items() if buffer in here]
        yield from _crossed(facts, pair, leaving, arriving)


def _crossed(
    facts: Facts, pair: tuple[int, int], leaving: list[Move], arriving: list[Move]
) -> Iterator[Fault]:
    """The first value that one device receives in another order than the other sends.

    Both repeat their order in every step, so a value that is sent for batch b at index k of n has,
    counted from where its batch began, the number k − b · n. Receives in the order of the sends
    find consecutive numbers, whatever the number of the first.
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
            yield facts.fault(
                pair[1],
                move.position,
                f"device {pair[0]} sends {left.buffer} before it, at position {left.position}",
                "receive in the order of the sends",
            )
            return


def delivered(facts: Facts) -> Iterator[Fault]:
    """The caller gets every output, and the gradient of every input that carries one, once."""
    program = facts.program
    seen: set[Buffer] = set()
    for device, life in enumerate(facts.lives):
        for position, instruction in life:
            if isinstance(instruction, ins.Output):
                if instruction.buffer in seen:
                    yield facts.fault(device, position, "the caller has it already", "keep one")
                seen.add(instruction.buffer)
    for edge in program.edges:
        if edge.target == HOST:
            make, stage = forward_buffer, edge.source
        elif edge.source == HOST and edge.gradient and facts.window.trains:
            make, stage = gradient_buffer, edge.target
        else:
            continue
        missing = [i for i in range(program.microbatches) if make(edge, i) not in seen]
        if missing:
            yield Fault(
                f"the caller never gets {make(edge, missing[0]).kind} {edge.value} of "
                f"{microbatches_text(missing)}",
                "add an output after the instruction that makes it",
                program.device_of(stage, missing[0]),
                subject=f"edge {edge}",
            )


def paused(facts: Facts) -> Iterator[Fault]:
    """Where the caller gets control back: it has all outputs, and gives gradients after it."""
    if not any(isinstance(x, ins.Pause) for own in facts.meetings for _, x in own):
        return
    for device, life in enumerate(facts.lives):
        resumed = False
        for position, instruction in life:
            match instruction:
                case ins.Pause() if resumed:
                    yield facts.fault(device, position, "there is a pause before it", "keep one")
                case ins.Pause():
                    resumed = True
                case ins.Load(Buffer(kind="in")) | ins.Output(Buffer(kind="out")) if resumed:
                    yield facts.fault(
                        device, position, "it comes after the pause", "move it before the pause"
                    )
                case ins.Load(Buffer(kind="grad")) | ins.Output(Buffer(kind="grad")) if not resumed:
                    yield facts.fault(
                        device, position, "it comes before the pause", "move it after the pause"
                    )


def stuck(facts: Facts, channel: int | None) -> Iterator[Fault]:
    """Where the lists do not run to their ends.

    Args:
        facts: the program.
        channel: how many values may be on their way from one device to another: a send waits
            until there is room for its own. With 0 it waits until the receive is reached. None
            is for any number.
    """
    # what waits for ever, and what is out of order on one device, other rules report
    waits = [
        [wait for wait in own if wait[1] != device]
        for device, own in enumerate(waits_of(facts.program))
    ]
    for pair, received in facts.received.items():
        sent = facts.sent.get(pair, [])
        yield from _too_late(facts, pair, sent, received)
        if channel is not None:
            yield from _sends(facts, pair, sent, received, channel, waits)
    for own in waits:
        own.sort()
    cure = "send earlier or receive later on one of the devices of the circle"
    if channel is not None:
        cure += f", or let more than {channel} values be on their way between two devices"
    lengths = [len(own) for own in facts.program.lists]
    yield from walk(lengths, waits).faults(facts.window.text, cure)


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
                f"device {source} sends it only {steps_later(move.batch - send.batch)}, at "
                f"position {send.position}",
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
                f"it waits for room, which device {target} makes only {steps_later(steps)}, at "
                f"position {receive.position}",
                f"receive earlier, or let more than {channel} values be on their way",
            )
