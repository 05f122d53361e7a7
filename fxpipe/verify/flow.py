"""Rules for what moves in a program: reads after writes, sends paired, nothing stuck or leaked."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.edge import HOST
from fxpipe.errors import Fault
from fxpipe.program import (
    Buffer,
    Load,
    Output,
    Pause,
    forward_buffer,
    gradient_buffer,
)
from fxpipe.text.instruction import print_instruction
from fxpipe.verify.facts import Facts, Move
from fxpipe.verify.spans import microbatches
from fxpipe.verify.waits import Place, Wait, deadlock_faults


def lives(facts: Facts) -> Iterator[Fault]:
    """On each device a buffer is made once, then read, then ended at most once."""
    program = facts.program
    for device, steps in facts.lists:
        alive: dict[Buffer, bool] = {}
        for position, instruction in steps:
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


def _absent(
    facts: Facts, device: int, buffer: Buffer, alive: dict[Buffer, bool]
) -> tuple[str, str]:
    """Why a buffer is not there, and what to do about it."""
    if buffer in alive:
        return f"{buffer} is freed already", "free it once, after its last use"
    made = facts.first_made[device].get(buffer)
    if made is not None:
        return f"{buffer} is made only at position {made}", "move that before it"
    return f"{buffer} is never made on this device", "load, receive or compute it before"


def leaks(facts: Facts) -> Iterator[Fault]:
    """Nothing is left on a device at the end of a step."""
    program = facts.program
    for device, steps in facts.lists:
        left: dict[Buffer, int] = {}
        for position, instruction in steps:
            for buffer in program.writes(instruction):
                left[buffer] = position
            for buffer in program.ends(instruction):
                left.pop(buffer, None)
        for buffer, position in left.items():
            yield facts.fault(
                device,
                position,
                f"{buffer} is still there at the end of the step",
                "free it after its last use",
            )


def paired(facts: Facts) -> Iterator[Fault]:
    """What one device sends another receives, once and in the same order."""
    for pair in sorted(facts.sent.keys() | facts.received.keys()):
        sent, received = facts.sent.get(pair, []), facts.received.get(pair, [])
        if [move.buffer for move in sent] == [move.buffer for move in received]:
            continue
        yield from _sent_twice(facts, pair[0], sent)
        here, there = {m.buffer: m for m in sent}, {m.buffer: m for m in received}
        for buffer, move in here.items():
            if buffer not in there:
                what = f"device {pair[1]} never receives it"
                yield facts.fault(pair[0], move.position, what, "receive it there")
        for buffer, move in there.items():
            if buffer not in here:
                what = f"device {pair[0]} never sends it"
                yield facts.fault(pair[1], move.position, what, "send it there")
        leaving = [buffer for buffer in here if buffer in there]
        arriving = [buffer for buffer in there if buffer in here]
        for left, arrived in zip(leaving, arriving, strict=True):
            if left != arrived:
                yield facts.fault(
                    pair[1],
                    there[arrived].position,
                    f"device {pair[0]} sends {left} before it, at position {here[left].position}",
                    "receive in the order of the sends",
                )
                break


def _sent_twice(facts: Facts, device: int, moves: list[Move]) -> Iterator[Fault]:
    """A value received twice is one made twice, and reported as that."""
    seen: set[Buffer] = set()
    for position, buffer in moves:
        if buffer in seen:
            yield facts.fault(device, position, "it is sent twice", "keep one")
        seen.add(buffer)


def delivered(facts: Facts) -> Iterator[Fault]:
    """The caller gets every output, and the gradient of every input that carries one, once."""
    program = facts.program
    seen: set[Buffer] = set()
    for device, steps in facts.lists:
        for position, instruction in steps:
            if isinstance(instruction, Output):
                if instruction.buffer in seen:
                    yield facts.fault(device, position, "the caller has it already", "keep one")
                seen.add(instruction.buffer)
    for edge in program.edges:
        if edge.target == HOST:
            make, stage = forward_buffer, edge.source
        elif edge.source == HOST and edge.gradient and facts.trains:
            make, stage = gradient_buffer, edge.target
        else:
            continue
        missing = [i for i in range(program.microbatches) if make(edge, i) not in seen]
        if missing:
            yield Fault(
                f"the caller never gets {make(edge, missing[0]).kind} {edge.value} of "
                f"{microbatches(missing)}",
                "add an output after the instruction that makes it",
                program.placement[stage],
                subject=f"edge {edge}",
            )


def paused(facts: Facts) -> Iterator[Fault]:
    """Where the caller gets control back: it has all outputs, and gives gradients after it."""
    if not any(isinstance(x, Pause) for own in facts.meetings for _, x in own):
        return
    for device, steps in facts.lists:
        resumed = False
        for position, instruction in steps:
            match instruction:
                case Pause() if resumed:
                    yield facts.fault(device, position, "there is a pause before it", "keep one")
                case Pause():
                    resumed = True
                case Load(Buffer(kind="in")) | Output(Buffer(kind="out")) if resumed:
                    yield facts.fault(
                        device, position, "it comes after the pause", "move it before the pause"
                    )
                case Load(Buffer(kind="grad")) | Output(Buffer(kind="grad")) if not resumed:
                    yield facts.fault(
                        device, position, "it comes before the pause", "move it after the pause"
                    )


def unstuck(facts: Facts) -> Iterator[Fault]:
    """The lists run to their ends: receives wait for sends, barriers and pauses for all devices."""
    sent = {
        move.buffer: Place(pair[0], move.position)
        for pair, moves in facts.sent.items()
        for move in reversed(moves)
    }
    waits: list[list[Wait]] = [[] for _ in facts.program.lists]
    for (_, device), moves in facts.received.items():
        for position, buffer in moves:
            if buffer in sent:
                waits[device].append(Wait(Place(device, position), sent[buffer]))
    for meeting in zip(*facts.meetings, strict=False):
        places = [Place(device, position) for device, (position, _) in enumerate(meeting)]
        for here in places:
            # A device arrives when it has passed what comes before.
            waits[here.device].extend(
                Wait(here, Place(there.device, there.position - 1))
                for there in places
                if there is not here and there.position > 0
            )
    for own in waits:
        own.sort()
    yield from deadlock_faults(
        waits,
        lambda place: print_instruction(facts.program.lists[place.device][place.position]),
        "send earlier or receive later on one of the devices of the circle",
    )
