"""Windows: CP-SAT puts the tasks of a short time into a better order, and leaves all others."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from fxpipe.search.exact import Exact
from fxpipe.search.local import Local
from fxpipe.search.problem import Order
from fxpipe.search.timeline import Timeline
from fxpipe.search.timing import value_of

PASSES = 25
"""List schedules that count as much as one window."""

_TASKS = 120
"""Tasks of a window, about, and the least for each device."""

_LEAST = 6

_EFFORT = 0.25
"""What the solver may spend on a window, by its own measure."""


def improve(local: Local, enough: float, go_on: Callable[[], bool]) -> None:
    """Put one window of the best order after another into a better order, until the time is down
    to ``enough`` or ``go_on()`` says no.

    An order that takes as long as the best is gone on from, too: the next window may gain by it.
    """
    assert local.best is not None
    timeline = Timeline(local.problem, local.best)
    while local.value > enough and go_on():
        local.passes += PASSES
        order = reordered(timeline, local.random)
        if order is not None and (value := value_of(local.problem, order)) <= local.value:
            local.offer(value, order)
            timeline = Timeline(local.problem, order)


def reordered(timeline: Timeline, random: Random) -> Order | None:
    """The order that is best, of those that only differ in a window that is drawn."""
    devices = timeline.problem.devices
    end = max(timeline.starts.values())
    width = end * max(_LEAST, _TASKS / devices) * devices / len(timeline.starts)
    begin = random.uniform(-width / 2, max(0.0, end - width / 2))
    window = Exact(timeline, begin, begin + width)
    return window.solve(inf, _EFFORT, random.randrange(10**6), workers=1)[0]
