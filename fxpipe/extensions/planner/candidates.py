"""Find the fastest step that fits: schedule, number of micro-batches, stages that recompute or
offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.costs import Times
from fxpipe.extensions.tables import time_text
from fxpipe.ir.recipe import Placement, Recipe, find_recipe, one_each
from fxpipe.ir.schedule import Edges
from fxpipe.passes.schedule import Recompute
from fxpipe.schedules import library

EXACT = 1.01
"""Times that differ by a smaller factor count as equal, as measurements are no more exact; then
memory decides."""

Modes = tuple[Recompute, ...]
"""Stage → whether it recomputes, or offloads."""


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


def library_over(devices: int, place: Placement = one_each) -> list[Recipe]:
    """The library's training schedules with a flush and this placement of stages.

    On one device all schedules are equally fast, and 1F1B, which holds the least, is the only one.
    """
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


def least_seconds(
    times: Times, recipe: Recipe, microbatches: int, devices: int, edges: Edges | None = None
) -> float:
    """A lower bound on the time of a step: each device has to do its work. With a flush it also
    waits for its first micro-batch to arrive, and its last backward has to return to stage 0. The
    stages feed each other by ``edges``, see Schedule."""
    schedule = replace(recipe(devices, microbatches), edges=edges)
    halves, flush = "I" in schedule.kinds, not schedule.overlaps
    work, weights = [0.0] * devices, [0.0] * devices
    # device → the time of a micro-batch up to the first of its stages, and of the way back; stage →
    # the same up to its end
    ways: dict[int, tuple[float, float]] = {}
    ends: dict[int, tuple[float, float]] = {}
    for s, home in enumerate(schedule.placement):
        before = [ends[source] for source in schedule.beside[0][s]]
        down = max((there for there, _ in before), default=0.0)
        up = max((back for _, back in before), default=0.0)
        forward, backward = times["F", s], times["I" if halves else "B", s]
        work[home] += microbatches * (forward + backward)
        weights[home] += microbatches * times["W", s] if halves else 0.0
        there, back = ways.get(home, (down, up))
        ways[home] = min(there, down), min(back, up)
        ends[s] = down + forward, up + backward
    return max(
        work[home] + max(weights[home] + flush * there, flush * (there + back))
        for home, (there, back) in ways.items()
    )


def evaluate(
    ways: Iterable[tuple[Recipe, int]],
    recompute: Modes | None,
    limits: Sequence[float],
    least: Callable[[Recipe, int], float],
    predict: Callable[[Candidate], Predicted | None],
    offload: Modes | None = (),
) -> list[Predicted]:
    """Predict candidates, in the order of their lower bounds, until no other one can be the
    fastest that fits. Returns all that were predicted: those that fit, the fastest first,
    then those that do not, with the least missing memory first.

    Args:
        ways: schedules with numbers of micro-batches.
        recompute: which stages recompute; None to choose: none, or enough to fit.
        limits: device → the bytes that it may hold.
        least: returns a lower bound on the time of a step.
        predict: returns what a candidate needs; None if it cannot run.
        offload: which stages offload, empty for none; None to choose, together with ``recompute``.
    """
    predicted: list[Predicted] = []
    bounds: list[tuple[float, tuple[Recipe, int]]] = []
    for way in ways:
        with suppress(InputError):  # no schedule of so many devices and micro-batches
            bounds.append((least(*way), way))
    for bound, (recipe, microbatches) in sorted(bounds, key=lambda pair: pair[0]):
        most = EXACT * min((x.seconds for x in predicted if x.fits(limits)), default=inf)
        if bound > most:
            break
        candidate = Candidate(recipe, microbatches, recompute or (), offload or ())
        predicted += variants(candidate, limits, predict, offloads=offload is None, worth=most)
    return sorted(predicted, key=lambda each: (sum(each.over(limits)), each.seconds))


def best_of(predicted: Sequence[Predicted]) -> Predicted:
    """Of those that are as fast as the first, the one that holds the least."""
    fast = [each for each in predicted if each.seconds <= EXACT * predicted[0].seconds]
    return min(fast, key=lambda each: max(each.peaks, default=0.0))


def variants(
    candidate: Candidate,
    limits: Sequence[float],
    predict: Callable[[Candidate], Predicted | None],
    *,
    offloads: bool = False,
    worth: float = inf,
) -> list[Predicted]:
    """Predict a candidate as it is, or with stages that recompute or offload so that it fits.

    Each stage keeps all its activations, offloads, recomputes, or does both. First all stages do
    the same. If keeping all fits, it is the fastest. Otherwise, as the memory of a device depends
    mostly on its own stages, what its device then lacks tells the options of each stage. All their
    combinations are predicted if there are at most ``_MOST``; else those that differ in one stage
    from the best so far, until none of them is better.

    Args:
        candidate: the candidate; if its ``recompute`` is given, nothing is chosen.
        limits: device → the bytes that it may hold.
        predict: returns what a candidate needs; None if it cannot run.
        offloads: whether stages may offload.
        worth: if a step takes more seconds than this even while all stages keep, it is of no use.
    """
    if candidate.recompute:
        needs = predict(candidate)
        return [] if needs is None or needs.seconds > worth else [needs]
    home = candidate.recipe.place(len(limits))
    known: dict[tuple[str, ...], Predicted | None] = {}

    def of(kinds: tuple[str, ...]) -> Predicted | None:
        if kinds not in known:
            chosen = replace(candidate, recompute=_modes(kinds, "recompute"))
            if offloads:
                chosen = replace(chosen, offload=_modes(kinds, "offload"))
            known[kinds] = predict(chosen)
        return known[kinds]

    # what all stages do → device → the bytes that it then lacks
    alike: dict[str, tuple[float, ...]] = {}
    for kind in ("keep", "offload", "recompute", "both") if offloads else ("keep", "recompute"):
        if kind == "both" and not any(alike.get("recompute", (1.0,))):
            break  # recomputing alone fits, so storing the inputs too gains nothing
        if (needs := of((kind,) * len(home))) is not None:
            if kind == "keep" and needs.seconds > worth:
                return []
            alike[kind] = needs.over(limits)
            if kind == "keep" and not any(alike[kind]):
                return [needs]
    if not alike:
        return []
    options = [
        _options({kind: over[device] for kind, over in alike.items()}, home.count(device))
        for device in home
    ]
    if prod(map(len, options)) <= _MOST:
        for kinds in product(*options):
            of(kinds)
    else:
        best = tuple(kinds[-1] for kinds in options)
        while best != (best := _improved(best, options, of, limits)):
            pass
    return [needs for needs in known.values() if needs is not None]


_MOST = 16
"""The most combinations of the stages' options that are all predicted."""


def _modes(kinds: Sequence[str], option: str) -> Modes:
    return tuple("always" if kind in (option, "both") else "never" for kind in kinds)


def _options(over: Mapping[str, float], stages: int) -> list[str]:
    """The options of a stage on a device with so many ``stages``: keeping all, if that fits; else
    those that lack least, where recomputing alone rules out doing both. If there are other stages
    on the device, keeping all is an option, too. ``over`` is option → bytes that the device
    lacks."""
    least = min(over.values())
    fitting = [kind for kind, lacks in over.items() if lacks == least]
    if fitting[0] == "keep":
        return ["keep"]
    if "recompute" in fitting and "both" in fitting:
        fitting.remove("both")
    return ["keep", *fitting] if stages > 1 and "keep" in over else fitting


def _improved(
    best: tuple[str, ...],
    options: Sequence[Sequence[str]],
    of: Callable[[tuple[str, ...]], Predicted | None],
    limits: Sequence[float],
) -> tuple[str, ...]:
    """The best of a combination and all that differ from it in one stage."""
    tried = [best]
    for s, kinds in enumerate(options):
        tried += [(*best[:s], kind, *best[s + 1 :]) for kind in kinds if kind != best[s]]

    def cost(combination: tuple[str, ...]) -> tuple[float, float]:
        needs = of(combination)
        return (inf, inf) if needs is None else (sum(needs.over(limits)), needs.seconds)

    return min(tried, key=cost)


def microbatch_counts(batch: int, devices: int) -> list[int]:
    """Into how many micro-batches a batch may be split: one per device, powers of two times that,
    or one per sample."""
    counts = {batch}
    count = min(devices, batch)
    while count <= batch and len(counts) < _COUNTS:
        counts.add(count)
        count *= 2
    return sorted(counts)


_COUNTS = 6


def interpolated(known: Mapping[int, float], samples: int) -> float:
    """A quantity by the samples of a micro-batch: linear in them if it is ``known`` for two numbers
    of samples, in proportion to them if it is known for one."""
    (a, at_a), *more = sorted(known.items())
    if not more:
        return at_a * samples / a
    b, at_b = more[0]
    slope = max(0.0, at_b - at_a) / (b - a)
    if samples < a:  # a part of the value, never less than 0, may not depend on the samples
        fixed = max(0.0, at_a - a * slope)
        return fixed + samples * (at_a - fixed) / a
    return at_a + (samples - a) * slope
