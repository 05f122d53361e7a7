"""Rules for values in a program: read after written, sends paired, nothing leaked or stuck.

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

from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.value import HOST, Buffer, forward_buffer, gradient_buffer
from fxpipe.ir.walk import Wait, waits_of, walk
from fxpipe.verify.facts import Facts, Transit
from fxpipe.verify.tasks import microbatches_text, steps_later


def lives(facts: Facts) -> Iterator[Fault]:
    """Check that each device makes a buffer once, then reads it, then ends it at most once.

    Once the pass ``free`` is done, nothing is left at the end of a batch.
    """
    program = facts.program
    freed = "free" in program.passes
    for device, life in enumerate(facts.lives):
        alive: dict[Buffer, bool] = {}
        for position, instruction in life:
            reads = instruction.uses(program)
            for buffer in reads:
                if not alive.get(buffer):
                    yield facts.fault(device, position, *_absent(facts, device, buffer, alive))
            for buffer in instruction.makes(program):
                if buffer in alive:
                    yield facts.fault(device, position, f"{buffer} was made before", "make it once")
                alive[buffer] = True
            for buffer in instruction.ends(program):
                if not alive.get(buffer) and buffer not in reads:
                    yield facts.fault(device, position, *_absent(facts, device, buffer, alive))
                if buffer in alive:
                    alive[buffer] = False
        for buffer in [buffer for buffer, there in alive.items() if there and freed]:
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
    """Check that each value is sent once and received once, in the same order on both devices."""
    for pair in sorted(facts.sent.keys() | facts.received.keys()):
        sent, received = facts.sent.get(pair, []), facts.received.get(pair, [])
        seen: set[Buffer] = set()
        for move in sent:  # a value received twice is also made twice, which ``lives`` reports
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
    facts: Facts, pair: tuple[int, int], leaving: list[Transit], arriving: list[Transit]
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
            yield facts.fault(
                pair[1],
                move.position,
                f"device {pair[0]} sends {left.buffer} before it, at position {left.position}",
                "receive in the order of the sends",
            )
            return


def delivered(facts: Facts) -> Iterator[Fault]:
    """Check that the caller gets each output and each input gradient once."""
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
    """Check that outputs come before the pause, and that gradients go to and fro after it."""
    if not any(isinstance(x, ins.Pause) for row in facts.meetings for _, x in row):
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
    """Check that the lists run to their ends.

    Args:
        facts: the program.
        channel: how many values may be in flight from one device to another before a send waits
            for room. With 0 a send waits for its receive, with None it never waits.
    """
    # waits for the device itself, in the wrong order or for ever, are reported by other rules
    waits = [
        [wait for wait in device_waits if wait[1] != device]
        for device, device_waits in enumerate(waits_of(facts.program))
    ]
    for pair, received in facts.received.items():
        sent = facts.sent.get(pair, [])
        yield from _too_late(facts, pair, sent, received)
        if channel is not None:
            yield from _sends(facts, pair, sent, received, channel, waits)
    for device_waits in waits:
        device_waits.sort()
    cure = "send earlier or receive later on one of the devices of the circle"
    if channel is not None:
        cure += f", or let more than {channel} values be on their way between two devices"
    lengths = [len(row) for row in facts.program.lists]
    yield from walk(lengths, waits).faults(facts.window.text, cure)


def _too_late(
    facts: Facts, pair: tuple[int, int], sent: list[Transit], received: list[Transit]
) -> Iterator[Fault]:
    """Check that a value is sent in the step in which it is received, or earlier."""
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
            yield facts.fault(
                device,
                move.position,
                f"it waits for room, which device {target} makes only {steps_later(steps)}, at "
                f"position {receive.position}",
                f"receive earlier, or let more than {channel} values be on their way",
            )
