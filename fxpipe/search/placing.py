"""Searches placements: which device holds which stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nsmallest
from math import inf
from random import Random

from fxpipe.errors import InputError
from fxpipe.search.bounds import Bound, best_bound, way_down
from fxpipe.search.local import Local, search_of
from fxpipe.search.problem import Problem
from fxpipe.search.read import Given, Places, placements_of, problems_of
from fxpipe.simulator.costs import Link

_PASSES = 24
"""List schedules that judge a placement."""

_ELITE = 4
_STALE = 500
"""Changes in a row that lead to nothing new, after which the search ends."""

_NODES = 50_000
"""Ways to put the first stages on devices that ``spread_bound`` looks at, at most."""

_DEEP = 100
"""Stages above which it looks at none."""


def best_placements(
    given: Given, random: Random, go_on: Callable[[int], bool], least: float
) -> list[Places]:
    """The best placements that a local search finds, as long as ``go_on(list schedules)``, or until
    one takes ``least``. From the usual ones on, stages are moved and swapped."""
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
        if alike:  # devices in the order in which they come
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
    """The time of some list schedules of a placement, and how many they were; infinite where it has
    no room, or a bound tells that it is not below the best."""
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
    """The same with a stage elsewhere, or with two stages or two devices swapped."""
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
    """Some device waits for its first micro-batch, and then works for all of its stages, for so
    long, however the stages are put on the devices: the least, over all ways to put them, of the
    longest of a device. Where there are too many ways, the mean over the devices."""
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
    """The least that the longest device can take; 0 where there are too many ways."""
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
