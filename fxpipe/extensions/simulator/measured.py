"""A measured run in the form of a simulation."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.errors import InputError
from fxpipe.extensions.exchange import Exchange
from fxpipe.extensions.simulator.simulation import Events, Simulation, TransferSpan
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.sums import begins, beside
from fxpipe.extensions.simulator.unroll import blocking, unroll
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer

_SECOND = 1e9


def measured_run(
    program: Program,
    steps: int,
    times: Sequence[Sequence[int]],
    sizes: Sizes | None = None,
    *,
    serial: bool = False,
) -> Simulation:
    """Return a run as a simulation, from the times of its instructions.

    A value leaves when its send is done, and its arrival is part of its receive. What replicas
    exchange, and what devices offload, is taken to be in transfer until it is waited for. If
    devices have streams, copies go on beside computations: a receive is then put where its value is
    first used, as in a simulation, and takes what is left of its copy.

    Args:
        program: one step of what ran.
        steps: how many steps ran, with the flush after the last.
        times: device → the start and end of each instruction that it ran, in nanoseconds.
        sizes: bytes of what devices hold.
        serial: whether one thread has run the lists of all devices.

    Raises:
        InputError: the steps have more or fewer instructions than ran.
    """
    flat = launched = unroll(program, steps)
    if [len(row) for row in times] != [2 * len(list_) for list_ in flat.lists]:
        raise InputError(
            f"what ran is not {steps} steps of program {program.name!r}: give batches that are "
            "cut into as many micro-batches each"
        )
    if program.launches:
        program = blocking(program)
        late = unroll(program, steps)
        times = [_rearranged(*device) for device in zip(flat.lists, times, late.lists, strict=True)]
        flat = late
    begin = min((row[0] for row in times if row), default=0)
    events = Events(
        tuple([(t - begin) / _SECOND for t in row[::2]] for row in times),
        tuple([(t - begin) / _SECOND for t in row[1::2]] for row in times),
    )
    left: dict[Exchange, int] = {}
    begun_at: dict[Buffer, int] = {}

    def note(what: Buffer | Exchange, device: int, target: int, at: int, until: int) -> None:
        """Note a transfer from the end of one instruction to that of another. An exchange that
        one instruction begins and waits for takes all of its time."""
        alone = at == until and isinstance(what, Exchange)
        sent = (events.starts if alone else events.ends)[device][at]
        end = events.ends[device][until]
        events.transfers[what] = TransferSpan(what, device, target, at, sent, sent, end)

    for device, list_ in enumerate(flat.lists):
        for at, x in enumerate(list_):
            if isinstance(x, ins.Send):
                note(x.buffer, device, flat.destination(x), at, at)
            elif (begun_copy := begins(x)) is not None:
                begun_at[begun_copy] = at
            elif (moved := beside(x)) is not None:
                note(moved, device, device, begun_at.pop(moved), at)
            if (begun := x.begins(program)) is not None:
                left[begun] = at
            if (awaited := x.awaits(program)) is not None:
                for parts in [p for p in left if replace(p, bucket=awaited.bucket) == awaited]:
                    note(parts, device, device, left.pop(parts), at)
    return Simulation(
        flat,
        program,
        steps,
        events,
        sizes,
        measured=True,
        seconds=True,
        serial=serial,
        launched=None if flat is launched else launched,
    )


def _rearranged(
    launched: Sequence[ins.Instruction], times: Sequence[int], list_: Sequence[ins.Instruction]
) -> list[int]:
    """The starts and ends of a device's instructions in the order of ``list_``, one after another.

    ``launched`` is the order in which they ran; ``list_`` has arrivals where their values are used.
    """
    ran: defaultdict[ins.Instruction, deque[tuple[int, int]]] = defaultdict(deque)
    for instruction, start, end in zip(launched, times[::2], times[1::2], strict=True):
        ran[instruction].append((start, end))
    rearranged: list[int] = []
    before = min(times, default=0)
    for instruction in list_:
        start, end = ran[instruction].popleft()
        start = before if isinstance(instruction, ins.Arrival) else max(start, before)
        before = max(start, end)
        rearranged += start, before
    return rearranged
