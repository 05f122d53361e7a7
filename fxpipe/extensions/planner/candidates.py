"""Find the fastest step that fits: schedule, number of micro-batches, stages that recompute or
offload."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from fxpipe.errors import InputError
from fxpipe.extensions.planner.bounds import ALWAYS, NEVER, Modes
from fxpipe.extensions.tables import time_text
from fxpipe.ir.recipe import Placement, Recipe, find_recipe, one_each
from fxpipe.schedules import library

EXACT = 1.01
"""Times that differ by a smaller factor count as equal, as measurements are no more exact; then
memory decides."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a step.

    Attributes:
        recipe: the schedule.
        microbatches: into how many micro-batches a batch is split.
        recompute: stage → whether it recomputes.
        offload: stage → whether it offloads; empty if none does.
    """

    recipe: Recipe
    microbatches: int
    recompute: Modes
    offload: Modes = ()

    def __str__(self) -> str:
        """As arguments of ``compile``."""
        text = f'schedule="{self.recipe.name}", microbatches={self.microbatches}'
        if again := _written(self.recompute):
            text += f", recompute={again}"
        if away := _written(self.offload):
            text += f", extensions=[fxpipe.Offload({away})]"
        return text


def _written(modes: Modes) -> str:
    """Modes as an argument; "" if they are all "never"."""
    some = {s: mode for s, mode in enumerate(modes) if mode != "never"}
    if some and len(set(modes)) == 1:
        return f'"{modes[0]}"'
    listed = ", ".join(f'{stage}: "{mode}"' for stage, mode in some.items())
    return f"{{{listed}}}" if some else ""


@dataclass(frozen=True)
class Predicted:
    """The time and memory that a candidate is predicted to need.

    Attributes:
        candidate: the candidate.
        seconds: the time of a step.
        peaks: device → the most bytes that it holds.
    """

    candidate: Candidate
    seconds: float
    peaks: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.candidate} ({time_text(self.seconds)}, predicted)"

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether no device exceeds its limit, see ``over``."""
        return not any(self.over(limits))

    def over(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Device → the bytes that it lacks."""
        pairs = zip(self.peaks, limits, strict=True)
        return tuple(max(0.0, p - most) for p, most in pairs)


def library_over(devices: int, place: Placement = one_each, *, flush: bool = True) -> list[Recipe]:
    """The library's training schedules with a flush and this placement of stages. Without, 2BW.

    On one device all schedules are equally fast, and 1F1B, which holds the least, is the only one.
    """
    if not flush:
        return [find_recipe("2bw")]
    if devices == 1:
        return [find_recipe("1f1b")]
    recipes = []
    for recipe in library():
        if recipe.place(devices) == place(devices) and not any(recipe.copies(devices)):
            schedule = recipe(devices, 2 * devices)
            fresh = not (schedule.overlaps or any(schedule.delays))
            if schedule.trains and fresh:
                recipes.append(recipe)
    return recipes


Way = tuple[Recipe, int]
"""A schedule and a number of micro-batches."""


class Bounds(Protocol):
    """Lower bounds on what a candidate needs, which cost far less than predicting it."""

    def seconds(self, candidate: Candidate) -> float:
        """Of a step. Raises InputError if the candidate has no schedule."""

    def peaks(self, candidate: Candidate) -> tuple[float, ...]:
        """Device → the most bytes that it holds."""


def evaluate(
    ways: Iterable[tuple[Recipe, int]],
    recompute: Modes | None,
    limits: Sequence[float],
    bounds: Bounds,
    predict: Callable[[Candidate], Predicted | None],
    offload: Modes | None = (),
    worth: float = inf,
    whole: bool = False,
) -> list[Predicted]:
    """Predict candidates, in the order of their lower bounds, until no other one can be the
    fastest that fits. Returns all that were predicted: those that fit, the fastest first,
    then those that do not, with the least missing memory first.

    Each stage keeps all its activations, recomputes, offloads, or does both. First all keep. If a
    device then lacks memory, by its lower bound or as predicted, one of its stages does otherwise:
    each choice is a further candidate, unless the device lacks memory whatever its stages do. A
    candidate that lacks memory by its bounds is not predicted, unless nothing fits: then the one
    that lacks least is. Nor is one that has a device whose stages do what was predicted to lack
    memory before, as what other devices do hardly matters to it.

    Args:
        ways: schedules with numbers of micro-batches.
        recompute: which stages recompute; None to choose: none, or enough to fit.
        limits: device → the bytes that it may hold.
        bounds: the lower bounds.
        predict: returns what a candidate needs; None if it cannot run.
        offload: which stages offload, empty for none; None to choose, together with ``recompute``.
        worth: a candidate whose step takes longer is of no use. If it is given, the result may be
            empty.
        whole: whether all stages of the devices that lack memory then do the same, so that few
            candidates are predicted.
    """
    devices, limited = len(limits), any(limit < inf for limit in limits)
    predicted: list[Predicted] = []
    refuted: list[Predicted] = []
    open_: list[tuple[float, int, int, Candidate]] = []
    met: set[Candidate] = set()
    tried: Counter[Way] = Counter()
    most = worth
    least: dict[Way, tuple[float, ...]] = {}
    lacking: dict[tuple[object, ...], float] = {}  # a device's modes → its peak, as predicted
    parents: dict[Candidate, tuple[int, float]] = {}  # what lacked before: the device and its peak

    def meet(candidate: Candidate, depth: int) -> None:
        if candidate not in met:
            met.add(candidate)
            # of equal bounds first that which is nearer to fitting
            heappush(open_, (bounds.seconds(candidate), -depth, len(met), candidate))

    for recipe, microbatches in ways:
        with suppress(InputError):  # no schedule of so many devices and micro-batches
            never = (NEVER,) * recipe.stages(devices)
            modes = [never if each is None else each for each in (recompute, offload)]
            meet(Candidate(recipe, microbatches, *modes), 0)

    def note(candidate: Candidate) -> Predicted | None:
        nonlocal most
        needs = predict(candidate)
        if needs is not None:
            predicted.append(needs)
            if needs.fits(limits):
                most = min(most, EXACT * needs.seconds)
        return needs

    def lacks_always(way: Way, device: int) -> bool:
        """Whether a device lacks memory whatever its stages do, as predicted."""
        if way not in least:
            never = (NEVER,) * way[0].stages(devices)
            always = (ALWAYS,) * len(never)
            again = always if recompute is None else recompute
            found = []
            for away in (never, always) if offload is None else (offload,):
                if (needs := note(Candidate(*way, again, away))) is not None:
                    found.append(needs.over(limits))
            least[way] = tuple(map(min, zip(*found, strict=True))) or (inf,) * devices
        return least[way][device] > 0

    while open_ and open_[0][0] <= most:
        seconds, depth, _, candidate = heappop(open_)
        way = candidate.recipe, candidate.microbatches
        if tried[way] == _MOST or any(least.get(way, ())):
            continue
        homes = candidate.recipe.place(devices)
        own = [_of_device(candidate, homes, d) for d in range(devices)]
        needs = Predicted(candidate, seconds, bounds.peaks(candidate) if limited else ())
        if short := limited and not needs.fits(limits):
            refuted.append(needs)
        elif any(x in lacking for x in own):
            pairs = zip(own, needs.peaks, strict=True)
            needs = replace(needs, peaks=tuple(max(x, lacking.get(k, x)) for k, x in pairs))
            short = True
        else:
            tried[way] += 1
            made = note(candidate)
            if made is None or made.fits(limits):
                continue
            needs = made
        if recompute is not None and offload is not None:
            continue
        over = needs.over(limits)
        if not short:
            lacking |= {k: x for k, x, y in zip(own, needs.peaks, over, strict=True) if y}
            device, before = parents.get(candidate, (0, inf))
            if needs.peaks[device] >= before:
                continue  # what it does more is of no use
        device = over.index(max(over))  # the one that lacks most
        if short or whole or not lacks_always(way, device):
            free = recompute is None, offload is None
            if whole:
                sets = [[s for s, home in enumerate(homes) if over[home]]]
            else:
                sets = [[s] for s, home in enumerate(homes) if home == device]
            for other in _relieved(candidate, sets, *free):
                if not short and not whole:
                    parents.setdefault(other, (device, needs.peaks[device]))
                meet(other, 1 - depth)

    def lacks(needs: Predicted) -> float:
        return sum(needs.over(limits))

    for nearest in sorted(refuted, key=lacks) if worth == inf else ():
        if predicted and min(map(lacks, predicted)) <= lacks(nearest):
            break
        note(nearest.candidate)
    return sorted(predicted, key=lambda each: (lacks(each), each.seconds))


_MOST = 16
"""Of the candidates that differ only in what their stages do, the most that are predicted."""


def _of_device(candidate: Candidate, homes: Sequence[Any], device: int) -> tuple[object, ...]:
    """What the stages of a device do."""
    modes = zip(homes, candidate.recompute, candidate.offload or candidate.recompute, strict=True)
    own = [(again, away) for home, again, away in modes if home == device]
    return candidate.recipe, candidate.microbatches, device, bool(candidate.offload), *own


def _relieved(
    candidate: Candidate, sets: Iterable[Sequence[int]], recomputes: bool, offloads: bool
) -> Iterator[Candidate]:
    """The candidates that need less: the stages of one of these sets do one thing more."""

    def more(modes: Modes, stages: Sequence[int]) -> Modes:
        return tuple(ALWAYS if s in stages else mode for s, mode in enumerate(modes))

    for stages in sets:
        again, away = candidate.recompute, candidate.offload
        if recomputes and "never" in (again[s] for s in stages):
            yield replace(candidate, recompute=more(again, stages))
        if offloads and "never" in (away[s] for s in stages):
            yield replace(candidate, offload=more(away, stages))


def best_of(predicted: Sequence[Predicted]) -> Predicted:
    """Of those that are as fast as the first, the one that holds the least."""
    fast = [each for each in predicted if each.seconds <= EXACT * predicted[0].seconds]
    return min(fast, key=lambda each: max(each.peaks, default=0.0))


def microbatch_counts(batch: int, devices: int) -> list[int]:
    """Into how many micro-batches a batch may be split: one per device, powers of two times that,
    and one per sample."""
    counts = {batch}
    count = min(devices, batch)
    while count < batch:
        counts.add(count)
        count *= 2
    return sorted(counts)


def interpolated(known: Mapping[int, float], samples: int) -> float:
    """A quantity by the samples of a micro-batch: linear between the two numbers of samples next to
    it for which it is ``known``, and beyond these; in proportion to them if it is known for one."""
    sizes = sorted(known)
    if len(sizes) == 1:
        return known[sizes[0]] * samples / sizes[0]
    at = min(max(bisect(sizes, samples), 1), len(sizes) - 1)
    a, b = sizes[at - 1], sizes[at]
    slope = max(0.0, known[b] - known[a]) / (b - a)
    if samples < a:  # a part of the value, never less than 0, may not depend on the samples
        fixed = max(0.0, known[a] - a * slope)
        return fixed + samples * (known[a] - fixed) / a
    return known[a] + (samples - a) * slope
