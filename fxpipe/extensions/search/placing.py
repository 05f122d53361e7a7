"""The search for a placement: which device holds which stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nsmallest
from math import inf
from random import Random

from fxpipe.errors import InputError
from fxpipe.extensions.search.bounds import Bound, best_bound, way_down
from fxpipe.extensions.search.local import Local, search_of
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.read import Given, Places, placements_of, problems_of
from fxpipe.extensions.simulator.costs import Link

_PASSES = 24
"""List schedules that judge a placement."""

_ELITE = 4
_STALE = 500
"""The search ends after this many changes in a row that lead to no new placement."""

_NODES = 50_000
"""The most ways to put the first stages on devices that ``spread_bound`` looks at."""

_DEEP = 100
"""With more stages it only takes the mean over the devices."""


def best_placements(
    given: Given, random: Random, go_on: Callable[[int], bool], least: float
) -> list[Places]:
    """Search placements, from the usual ones on, by moving and swapping stages; return the best.

    It ends when one takes only ``least``, or when ``go_on(list schedules so far)`` is false.
    """
    limits = given.limits(given.counts[1])
    alike = len(set(limits)) == 1 and (given.links is None or isinstance(given.links, Link))
    elite: list[tuple[float, Places]] = []
    seen: set[Places] = set()
    waiting = placements_of(replace(given, placement=None))
    passes = stale = 0
    best, places = inf, waiting[0]
    while stale < _STALE and (waiting or (best > least and go_on(passes))):
        if elite:
            places = random.choice(elite)[1]
        places = waiting.pop(0) if waiting else changed(places, random)
        if alike:  # number the devices in the order of their first stages
            places = tuple(map(list(dict.fromkeys(places)).index, places))
        stale += 1
        if places in seen:
            continue
        seen.add(places)
        value, more = judged(given.on(places), best)
        passes += more
        if value < inf:
            elite = sorted([*elite, (value, places)])[:_ELITE]
            best, stale = elite[0][0], 0
    return [places for _, places in elite]


def judged(given: Given, best: float) -> tuple[float, int]:
    """Try list schedules of a placement; return the least time, and how many they were.

    The time is infinite if a micro-batch does not fit, or if a bound is not below ``best``.
    """
    value, passes = inf, 0
    try:
        problems = problems_of(given)
    except InputError:
        return inf, 1
    for problem in problems:
        bound = best_bound(problem).time
        if bound < best:
            local = _tried(problem, bound)
            value, passes = min(value, local.value), passes + local.passes
    return value, passes or 1


def _tried(problem: Problem, enough: float) -> Local:
    local = search_of(problem, Random(0))
    local.run(enough, lambda: local.passes < _PASSES)
    return local


def changed(places: Places, random: Random) -> Places:
    """The placement with a random stage moved, or with two stages or two devices swapped."""
    one, other = random.randrange(len(places)), random.randrange(len(places))
    home, there = places[one], places[other]
    kind = random.randrange(3)
    if kind == 0 and places.count(home) > 1:
        return (*places[:one], there, *places[one + 1 :])
    swap = {home: there, there: home}
    if kind == 1:
        return tuple(swap.get(place, place) for place in places)
    return tuple(swap[place] if s in (one, other) else place for s, place in enumerate(places))


def spread_bound(wide: Problem, devices: int) -> Bound:
    """A bound for all placements, from how long the devices wait for their first micro-batch and
    then work: the longest time of a device, in the placement where that is least. If there are too
    many placements, the mean over the devices."""
    heads = [way_down(wide, 0, s) if wide.flush else 0.0 for s in range(wide.stages)]
    work = list(wide.work)
    update = 0.0
    if wide.flush:
        update = max(*wide.update, sum(wide.update) / devices)
    else:
        work = [time + more for time, more in zip(work, wide.update, strict=True)]
    mean = (sum(work) + sum(nsmallest(devices, heads))) / devices
    time = max(mean, _least_of_all(heads, work, devices))
    return Bound(time + update, "spread", 0, {"longest": time, "update": update})


def _least_of_all(heads: Sequence[float], work: Sequence[float], devices: int) -> float:
    """The longest time of a device where that is least; 0 if there are too many placements."""
    best = inf
    seen: set[tuple[int, tuple[float, ...]]] = set()

    def place(stage: int, taken: tuple[float, ...]) -> None:
        nonlocal best
        if (stage, taken) in seen or len(seen) >= _NODES:
            return
        seen.add((stage, taken))
        if stage == len(work):
            best = max(taken)
            return
        ways = [(time + work[stage], at) for at, time in enumerate(taken)]
        if len(taken) < devices:
            ways.append((heads[stage] + work[stage], len(taken)))
        for time, at in sorted(ways):
            if time < best:
                place(stage + 1, tuple(sorted((*taken[:at], time, *taken[at + 1 :]))))

    if len(work) > _DEEP:
        return 0.0
    place(0, ())
    return 0.0 if len(seen) >= _NODES else best
