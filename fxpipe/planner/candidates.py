"""Which schedule, how many micro-batches, which stages recompute or offload: the fastest step that
fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import inf, prod

import fxpipe.schedules as library
from fxpipe.errors import InputError
from fxpipe.formatting import time_text
from fxpipe.ir.recipe import Placement, Recipe, find_recipe, one_each
from fxpipe.passes.schedule import Recompute
from fxpipe.simulator.costs import Times

EXACT = 1.01
"""Times that differ by less are equal, as measured times are no exacter; then memory decides."""

Modes = tuple[Recompute, ...]
"""Stage → whether it recomputes."""


@dataclass(frozen=True)
class Candidate:
    """What a step could be like.

    Attributes:
        recipe: its schedule.
        microbatches: into how many a batch is split.
        recompute: stage → its mode.
        offload: the same; empty for no stage.
    """

    recipe: Recipe
    microbatches: int
    recompute: Modes
    offload: Modes = ()

    def __str__(self) -> str:
        text = f'schedule="{self.recipe.name}", microbatches={self.microbatches}'
        for option, modes in (("recompute", self.recompute), ("offload", self.offload)):
            some = {s: mode for s, mode in enumerate(modes) if mode != "never"}
            if some and len(set(modes)) == 1:
                text += f', {option}="{modes[0]}"'
            elif some:
                listed = ", ".join(f'{stage}: "{mode}"' for stage, mode in some.items())
                text += f", {option}={{{listed}}}"
        return text


@dataclass(frozen=True)
class Predicted:
    """What a candidate is predicted to need.

    Attributes:
        candidate: it.
        seconds: of a step; where batches overlap, in the long run.
        held: device → the most bytes that it holds; or what counts them, where that takes a while.
        idle: the share of the devices' time that is idle.
        roughly: device → the same, where it is known without a derivation of the stages; empty
            where it is not.
    """

    candidate: Candidate
    seconds: float
    held: tuple[float, ...] | Callable[[], tuple[float, ...]]
    idle: float = 0.0
    roughly: tuple[float, ...] = ()

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Device → the most bytes that it holds; infinite where the candidate cannot run."""
        return self.held() if callable(self.held) else self.held

    def __str__(self) -> str:
        return f"{self.candidate} ({time_text(self.seconds)}, predicted)"

    def fits(self, limits: Sequence[float], *, exactly: bool = False) -> bool:
        """Whether all devices keep their limits."""
        return not any(self.over(limits, exactly=exactly))

    def over(self, limits: Sequence[float], *, exactly: bool = False) -> tuple[float, ...]:
        """Device → the bytes that it lacks; unless ``exactly`` is asked for, none where ``roughly``
        is far below the limits."""
        ample = (_AMPLE * p <= most for p, most in zip(self.roughly, limits, strict=False))
        if self.roughly and not exactly and all(ample):
            return (0.0,) * len(limits)
        pairs = zip(self.peaks, limits, strict=True)
        return tuple(p if p == inf else max(0.0, p - most) for p, most in pairs)


_AMPLE = 4.0
"""With so many times the memory that is roughly needed, no exact count is asked for."""


def library_over(
    devices: int, place: Placement = one_each, *, stale: bool = False, halves: bool = True
) -> list[Recipe]:
    """The library's schedules that train with their stages at these places. On one device all of
    them are as fast, and 1F1B keeps the least.

    Args:
        devices: how many.
        place: where the stages are.
        stale: whether batches may read weights that are older than the newest.
        halves: whether backwards may be in halves.
    """
    if devices == 1:
        return [find_recipe("1f1b")]
    found = []
    for name in library.__all__:
        recipe: Recipe = getattr(library, name)
        if recipe.place(devices) == place(devices) and not any(recipe.copies(devices)):
            made = recipe(devices, 2 * devices)
            fits = (stale or not (made.overlaps or any(made.delays))) and (
                halves or "I" not in made.kinds
            )
            if made.trains and fits:
                found.append(recipe)
    return found


def least_seconds(times: Times, recipe: Recipe, microbatches: int, devices: int) -> float:
    """A time that no step takes less than: each device has its work to do. With a flush it begins
    when its first micro-batch comes, and its last one has to go back."""
    made = recipe(devices, microbatches)
    halves, flush = "I" in made.kinds, not made.overlaps
    work, later = [0.0] * devices, [0.0] * devices
    down, up, ways = 0.0, 0.0, dict[int, tuple[float, float]]()
    for s, home in enumerate(made.placement):
        forward, back = times["F", s], times["I" if halves else "B", s]
        work[home] += microbatches * (forward + back)
        later[home] += microbatches * times["W", s] if halves else 0.0
        ways.setdefault(home, (down, up))
        down, up = down + forward, up + back
    return max(
        work[home] + max(later[home] + flush * way, flush * (way + back))
        for home, (way, back) in ways.items()
    )


def evaluate(
    ways: Iterable[tuple[Recipe, int]],
    recompute: Modes | None,
    limits: Sequence[float],
    least: Callable[[Recipe, int], float],
    predict: Callable[[Candidate], Predicted | None],
    keep: int = 1,
    offload: Modes | None = (),
    worth: float = inf,
) -> list[Predicted]:
    """Predict candidates, those that could be fastest first, until no other one can be among the
    ``keep`` fastest that fit. First those that fit, then those that lack least.

    Args:
        ways: the schedules with their numbers of micro-batches.
        recompute: which stages recompute; None to choose: none, or enough so that all fits.
        limits: device → the bytes that it may hold.
        least: what no step takes less time than.
        predict: what a candidate needs; None if it cannot run.
        keep: how many are asked for.
        offload: which stages offload, empty for none; None to choose, together with ``recompute``.
        worth: a step that takes more seconds than this is of no use.
    """
    found: list[Predicted] = []
    bounds: list[tuple[float, tuple[Recipe, int]]] = []
    for way in ways:
        with suppress(InputError):  # it is not for so many devices and micro-batches
            bounds.append((least(*way), way))
    for bound, (recipe, microbatches) in sorted(bounds, key=lambda each: each[0]):
        fast = sorted(each.seconds for each in found if each.fits(limits))
        most = min(worth, EXACT * fast[keep - 1]) if len(fast) >= keep else worth
        if bound > most:
            break
        given = Candidate(recipe, microbatches, recompute or (), offload or ())
        found += variants(given, limits, predict, offloads=offload is None, worth=most)
    return sorted(found, key=lambda each: (sum(each.over(limits)), each.seconds))


def best_of(found: Sequence[Predicted]) -> Predicted:
    """Of those that are as fast as the first, the one that holds the least."""
    first = found[0]
    fast = [each for each in found if each.seconds <= EXACT * first.seconds]
    return min(fast, key=lambda each: max(each.roughly or each.peaks, default=0.0))


def variants(
    candidate: Candidate,
    limits: Sequence[float],
    predict: Callable[[Candidate], Predicted | None],
    *,
    offloads: bool = False,
    worth: float = inf,
) -> list[Predicted]:
    """A candidate as it is, or with so much recomputed, or offloaded, that it fits.

    What a device holds depends on what its own stages do, hardly on the others. So what all
    stages do alike tells which ways each stage has; keeping all is the fastest where it fits.
    All combinations of the other ways are predicted, or, where these are more than ``_MOST``, those
    that differ in one stage from the best so far, until none of them is faster.

    Args:
        candidate: what is given of it is not chosen: any recomputation.
        limits: device → the bytes that it may hold.
        predict: what a candidate needs; None if it cannot run.
        offloads: whether stages may offload.
        worth: where nothing is recomputed or offloaded and a step takes longer, it is of no use.
    """
    if candidate.recompute:
        made = predict(candidate)
        return [] if made is None or made.seconds > worth else [made]
    home = candidate.recipe.place(len(limits))
    known: dict[tuple[str, ...], Predicted | None] = {}

    def of(ways: tuple[str, ...]) -> Predicted | None:
        if ways not in known:
            chosen = replace(candidate, recompute=_modes(ways, "recompute"))
            if offloads:
                chosen = replace(chosen, offload=_modes(ways, "offload"))
            known[ways] = predict(chosen)
        return known[ways]

    kinds = ("keep", "offload", "recompute", "both") if offloads else ("keep", "recompute")
    alike: dict[str, tuple[float, ...]] = {}
    for kind in kinds:
        if kind == "both" and not any(alike.get("recompute", (1.0,))):
            break  # storing the inputs besides gains nothing
        if (made := of((kind,) * len(home))) is not None:
            if kind == "keep" and made.seconds > worth:
                return []
            alike[kind] = made.over(limits)
            if kind == "keep" and not any(alike[kind]):
                return [made]
    if not alike:
        return []
    ways = [
        _ways({kind: over[device] for kind, over in alike.items()}, home.count(device))
        for device in home
    ]
    if prod(map(len, ways)) <= _MOST:
        for each in product(*ways):
            of(each)
    else:
        best = tuple(own[-1] for own in ways)
        while best != (best := _exchanged(best, ways, of, limits)):
            pass
    return [made for made in known.values() if made is not None]


_MOST = 16
"""So many combinations of what stages may do are predicted at most."""


def _modes(ways: Sequence[str], option: str) -> Modes:
    return tuple("always" if way in (option, "both") else "never" for way in ways)


def _ways(over: Mapping[str, float], stages: int) -> list[str]:
    """What a stage may do, by what its device then lacks: keep all where that fits, or else what
    fits, or what lacks least, both only where recomputing alone lacks more; and keep all where
    another of its device's ``stages`` may not."""
    least = min(over.values())
    fitting = [kind for kind, lacks in over.items() if lacks == least]
    if fitting[0] == "keep":
        return ["keep"]
    if "recompute" in fitting and "both" in fitting:
        fitting.remove("both")
    return ["keep", *fitting] if stages > 1 and "keep" in over else fitting


def _exchanged(
    best: tuple[str, ...],
    ways: Sequence[Sequence[str]],
    of: Callable[[tuple[str, ...]], Predicted | None],
    limits: Sequence[float],
) -> tuple[str, ...]:
    """The best of these ways and all that differ from them in one stage."""
    tried = [best]
    for stage, own in enumerate(ways):
        tried += [(*best[:stage], way, *best[stage + 1 :]) for way in own if way != best[stage]]

    def needs(each: tuple[str, ...]) -> tuple[float, float]:
        made = of(each)
        return (inf, inf) if made is None else (sum(made.over(limits)), made.seconds)

    return min(tried, key=needs)


def microbatch_counts(batch: int, devices: int) -> list[int]:
    """Into how many micro-batches a batch may be split: a few per device, of like sizes, and one
    sample each."""
    counts = {batch}
    count = min(devices, batch)
    while count <= batch and len(counts) < _COUNTS:
        counts.add(count)
        count *= 2
    return sorted(counts)


_COUNTS = 6


@dataclass(frozen=True)
class Affine:
    """A quantity by the samples of a micro-batch, between those that are known and beyond them.

    Attributes:
        known: samples → what it is then.
    """

    known: Mapping[int, float]

    def __call__(self, samples: int) -> float:
        if len(self.known) == 1:
            ((size, value),) = self.known.items()
            return value * samples / size
        points = sorted(self.known.items())
        (a, at_a), (b, at_b) = points[:2]
        for (c, at_c), (d, at_d) in pairwise(points):
            if samples >= c:
                (a, at_a), (b, at_b) = (c, at_c), (d, at_d)
        if samples < a:  # below them a share of it may be there for any number of samples
            fixed = max(0.0, at_a - a * max(0.0, at_b - at_a) / (b - a))
            return fixed + samples * (at_a - fixed) / a
        return max(at_a + (samples - a) * (at_b - at_a) / (b - a), at_a)
