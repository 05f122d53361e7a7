"""What a device holds over time, and when it holds the most."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from fxpipe.extensions.simulator.holding import Holding
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir import instruction as ins


@dataclass(frozen=True)
class Memory:
    """What a device holds over time.

    Attributes:
        peak: the most bytes at once.
        time: when it holds that many for the first time.
        position: the position of the instruction that runs then.
        levels: for each instruction, in order, the bytes while it runs.
        resting: the bytes of parameters and optimizer state before the first instruction.
        parts: part of the peak, as in ``fxpipe.extensions.simulator.holding.PARTS`` → its bytes.
    """

    peak: int
    time: float
    position: int
    levels: tuple[int, ...] = field(repr=False)
    resting: int = 0
    parts: Mapping[str, int] = field(default_factory=dict, repr=False)


def memory_over_time(simulation: Simulation, sizes: Sizes) -> tuple[Memory, ...]:
    """Device → its memory.

    While a graph runs whose workspace is known, its memory is the most that its nodes hold. For
    other instructions, outputs count from the start, and inputs that are used up count until the
    end. A value that arrives counts from its receive, or, with ``sizes.early``, from its arrival or
    from when its receive is posted. Memory that several buffers share counts once, until the last
    of them is gone. Devices with streams take and free memory in the order of their launches.
    """
    program = simulation.launched or simulation.program
    return tuple(
        _memory(simulation, Holding(program, sizes, device)) for device in range(simulation.devices)
    )


def _launches(simulation: Simulation, device: int) -> tuple[list[int], list[float]]:
    """For each instruction in the order of launches: its position in the simulated list, and when
    it is launched. An arrival follows the instruction before it at once."""
    list_, starts = simulation.program.lists[device], simulation.events.starts[device]
    if simulation.launched is None:
        return [*range(len(list_))], [*starts]
    places: defaultdict[ins.Instruction, deque[int]] = defaultdict(deque)
    for at, x in enumerate(list_):
        places[x].append(at)
    order, begun, now = list[int](), list[float](), 0.0
    for x in simulation.launched.lists[device]:
        order.append(places[x].popleft())
        now = now if isinstance(x, ins.Arrival) else max(now, starts[order[-1]])
        begun.append(now)
    return order, begun


def _early(
    simulation: Simulation, holding: Holding, starts: Sequence[float]
) -> list[tuple[float, int, int]]:
    """For each value that is in memory before its receive: since when, the position of its receive
    and its bytes."""
    most = holding.sizes.early
    if not most:
        return []
    list_, sizes = holding.program.lists[holding.device], holding.sizes
    received = {x.buffer: at for at, x in enumerate(list_) if isinstance(x, ins.Receive)}
    if most < inf:  # its memory is taken when its receive is posted, at an earlier receive
        ahead = int(most)
        places: defaultdict[int, list[int]] = defaultdict(list)
        posted = []
        for buffer, at in received.items():
            before = places[simulation.program.ends_of(buffer)[0]]
            since = starts[before[-ahead]] if len(before) >= ahead else 0.0
            posted.append((since, at, sizes.crossing(buffer)))
            before.append(at)
        return sorted(posted)
    return sorted(
        (transfer.end, received[buffer], sizes.crossing(buffer))
        for buffer, transfer in simulation.events.transfers.items()
        if transfer.target == holding.device and buffer in received
    )


def _memory(simulation: Simulation, holding: Holding) -> Memory:
    order, starts = _launches(simulation, holding.device)
    resting = holding.bytes
    levels = [0] * len(order)
    early = deque(_early(simulation, holding, starts))
    waiting: dict[int, int] = {}
    peak, parts = -1, dict(holding.parts)
    for position, start in enumerate(starts):
        while early and early[0][0] <= start:
            _, received, size = early.popleft()
            waiting[received] = size
        waiting = {received: size for received, size in waiting.items() if received > position}
        level, beside = holding.run(position), sum(waiting.values())
        levels[order[position]] = level + beside
        if level + beside > peak:
            peak, parts = level + beside, holding.parts_of(level)
            parts["values"] += beside
        holding.finish(position)
    if not levels:
        return Memory(resting, 0, 0, (), resting, parts)
    position = levels.index(peak)
    time = simulation.events.starts[holding.device][position]
    return Memory(peak, time, position, tuple(levels), resting, parts)
