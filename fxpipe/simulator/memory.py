"""How much a device holds, and when it holds the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpipe.ir.program import Compute, Update
from fxpipe.simulator.holding import Holding
from fxpipe.simulator.simulation import Simulation
from fxpipe.simulator.sizes import Sizes


@dataclass(frozen=True)
class Memory:
    """What a device holds over time.

    Attributes:
        peak: the most bytes at once.
        time: when it holds that many for the first time.
        position: the instruction that runs then.
        levels: for each instruction, in order, the bytes while it runs.
        resting: the bytes of parameters and optimizer state before the first instruction.
        parts: what the peak is made of → its bytes; see PARTS.
    """

    peak: int
    time: float
    position: int
    levels: tuple[int, ...] = field(repr=False)
    resting: int = 0
    parts: Mapping[str, int] = field(default_factory=dict, repr=False)


def memory_over_time(simulation: Simulation, sizes: Sizes) -> tuple[Memory, ...]:
    """Device → its memory.

    While a graph runs whose workspace is known, memory is what its nodes hold at their worst. What
    another instruction makes counts from its start, and what it uses up until its end; a value
    that arrives counts from its receive. One piece of memory that several buffers hold counts
    once, until the last of them is gone.
    """
    everywhere, program = _updated(simulation), simulation.program
    computed = (x for own in program.lists for x in own if isinstance(x, Compute))
    apart = len({x.batch - x.version for x in computed}) > 1
    return tuple(
        _memory(simulation, Holding(program, sizes, device, apart=apart), everywhere)
        for device in range(simulation.devices)
    )


def _updated(simulation: Simulation) -> dict[int, float]:
    """Version → when all stages have made it."""
    found: dict[int, float] = {}
    for span in simulation.instructions():
        if isinstance(span.instruction, Update):
            version = span.instruction.writes
            found[version] = max(found.get(version, 0), span.end)
    return found


def _memory(simulation: Simulation, holding: Holding, everywhere: Mapping[int, float]) -> Memory:
    starts = simulation.events.starts[holding.device]
    resting = holding.bytes
    levels: list[int] = []
    peak, parts = -1, dict(holding.parts)
    for position, start in enumerate(starts):
        holding.reach(start, everywhere)
        level = holding.run(position)
        levels.append(level)
        if level > peak:
            peak, parts = level, holding.parts_of(level)
        holding.finish(position)
    if not levels:
        return Memory(resting, 0, 0, (), resting, parts)
    position = levels.index(peak)
    return Memory(peak, starts[position], position, tuple(levels), resting, parts)
