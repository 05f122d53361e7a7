"""What a step takes in the long run, when many follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

from fxpipe.errors import InputError
from fxpipe.ir.instruction import batch_of, letter_of
from fxpipe.simulator.simulation import Simulation

_FIRST, _LAST = 16, 256
"""Steps that are tried, doubled until the times repeat."""


@dataclass(frozen=True)
class Steady:
    """The long run.

    Attributes:
        period: the time of a step.
        bubble: the share of the devices' time that is idle.
        steps: after so many steps everything repeats, later by a fixed time; None where it did
            not within the steps that were tried, and the period is the mean of their later half.
        cycle: how many steps later it repeats.
    """

    period: float
    bubble: float
    steps: int | None
    cycle: int


def steady_state(simulation: Simulation) -> Steady:
    """Simulate more and more steps until every instruction repeats.

    The times are those of a system of maxima and sums, which comes to repeat itself after finitely
    many steps (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992). What
    happens in a step depends on the ``depth + 1`` steps before it alone, so that as many which
    repeat go on to do so.

    Raises:
        InputError: the run was measured.
    """
    if simulation.again is None:
        raise InputError("a measured run cannot go on; simulate the program with its costs")
    reach = simulation.window.depth + 1
    steps = _FIRST + reach
    while True:
        longer = simulation.again(steps)
        windows = [_ends(longer, step) for step in range(longer.window.depth, steps)]
        cycle = _cycle(windows, reach)
        if cycle is not None or steps >= _LAST:
            break
        steps *= 2
    if cycle is None:
        half = len(windows) // 2
        period = (max(windows[-1]) - max(windows[half])) / (len(windows) - 1 - half)
        return Steady(period, _bubble(longer, period), None, 0)
    period = (windows[-1][0] - windows[-1 - cycle][0]) / cycle
    first = len(windows) - 1
    while first >= cycle and _repeats(windows[first - cycle], windows[first]):
        first -= 1
    before = max(first + 1 - cycle, 0) + longer.window.depth
    return Steady(period, _bubble(longer, period), before, cycle)


def _ends(simulation: Simulation, step: int) -> list[float]:
    """When the instructions of one whole window end, on all devices."""
    ends: list[float] = []
    for device in range(simulation.devices):
        first, stop = _window(simulation, device, step)
        ends += simulation.events.ends[device][first:stop]
    return ends


def _window(simulation: Simulation, device: int, step: int) -> tuple[int, int]:
    """The positions of a whole window; the first ones lack what is of batches before them."""
    own, depth = simulation.window.lists[device], simulation.window.depth
    batches = [batch_of(instruction) for instruction in own]
    lead = sum(1 for early in range(depth) for batch in batches if early + batch >= 0)
    first = lead + (step - depth) * len(own)
    return first, first + len(own)


def _cycle(windows: Sequence[Sequence[float]], reach: int) -> int | None:
    """How many windows later the last ones repeat."""
    for cycle in range(1, (len(windows) - reach) // 2 + 1):
        last = range(len(windows) - reach, len(windows))
        if all(_repeats(windows[k - cycle], windows[k]) for k in last):
            return cycle
    return None


def _repeats(earlier: Sequence[float], later: Sequence[float]) -> bool:
    """Whether everything happens again after one and the same time."""
    if not earlier:
        return True
    shift = later[0] - earlier[0]
    return all(
        isclose(b - a, shift, rel_tol=1e-9, abs_tol=1e-12 * abs(b))
        for a, b in zip(earlier, later, strict=True)
    )


def _bubble(simulation: Simulation, period: float) -> float:
    busy: float = 0
    for device, own in enumerate(simulation.program.lists):
        starts, ends = simulation.events.starts[device], simulation.events.ends[device]
        for position in range(*_window(simulation, device, simulation.window.depth)):
            if letter_of(own[position]):
                busy += ends[position] - starts[position]
    return 1 - busy / (simulation.devices * period) if period else 0.0
