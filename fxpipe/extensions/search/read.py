"""Make problems from the arguments of a search: times, links, bytes and placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from operator import index

from fxpipe.errors import InputError
from fxpipe.extensions.search.problem import NoRoom, Problem
from fxpipe.extensions.simulator.costs import (
    Costs,
    Links,
    Times,
    check_keys,
    check_links,
    link_between,
    times_of,
)
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.recipe import Placement, Recipe, one_each, vee

_LETTERS = "FBIWU"
MOST = 50_000
"""The most forwards, of all stages and micro-batches, that are searched."""

Places = tuple[int, ...]
"""Stage → its device."""


@dataclass(frozen=True)
class Given:
    """The arguments of ``search_schedule`` that make its problems; see there."""

    costs: Costs
    microbatches: int
    devices: int | None
    placement: Sequence[int] | Placement | None
    whole: bool | None
    memory: float | Sequence[float] | None
    sizes: Sizes | None
    links: Links | None
    flush: bool

    def __post_init__(self) -> None:
        if self.costs is None:
            raise InputError("costs is None; map letters of tasks to times, such as {'F': 1.0}")
        check_keys(self.costs)
        if apart := [key for key in self.costs if not isinstance(key, str) and len(key) == 3]:
            raise InputError(
                f"costs has {apart[0]}, and a search takes the same times for all micro-batches; "
                "leave the micro-batch out, and simulate what is found with times of each"
            )
        check_links(self.links)
        if self.sizes is not None and not isinstance(self.sizes, Sizes):
            raise InputError(f"sizes is {self.sizes!r}; give Sizes(...)")
        memory = self.memory
        limits = memory if isinstance(memory, Sequence) else () if memory is None else (memory,)
        if isinstance(memory, str) or not all(isinstance(limit, Real) for limit in limits):
            raise InputError(f"memory is {memory!r}; give a number, or one for each device")
        for word, least in (("microbatches", 1), ("devices", 1)):
            count = getattr(self, word)
            if count is None and word == "devices":
                continue
            if not isinstance(count, Integral) or count < least:
                raise InputError(f"{word} is {count!r}; give a whole number of at least {least}")
            object.__setattr__(self, word, int(count))

    def limits(self, devices: int) -> tuple[float, ...]:
        """Device → the memory that it may use."""
        memory = inf if self.memory is None else self.memory
        if not isinstance(memory, Sequence):
            return (memory,) * devices
        if len(memory) != devices:
            raise InputError(
                f"memory has {len(memory)} numbers for {devices} devices; give one for each, or "
                "one for all"
            )
        return tuple(memory)

    @property
    def counts(self) -> tuple[int, int]:
        """How many stages and devices there are if no placement is given."""
        named = [key[1] for key in self.costs if not isinstance(key, str)]
        if self.devices is None and not named:
            raise InputError("nothing tells how many stages there are; give devices=, such as 4")
        stages = max(named) + 1 if named else self.devices or 1
        devices = self.devices or stages
        stages = max(stages, devices)
        self.check_size(stages)
        return stages, devices

    def check_size(self, stages: int) -> None:
        """Check that list schedules can be made in reasonable time; raises InputError."""
        if stages * self.microbatches > MOST:
            raise InputError(
                f"there are {stages} stages and microbatches is {self.microbatches}; at most "
                f"{MOST} forwards are searched, so take fewer micro-batches: what is best for "
                "these is mostly best for more"
            )


def problems_of(given: Given) -> list[Problem]:
    """Return a problem for each placement to search, with whole backwards, halves, or each of both.

    Those for which a device has no room are left out, unless there is none for any.

    Raises:
        InputError: an argument is not valid.
    """
    letters = {key if isinstance(key, str) else key[0] for key in given.costs}
    whole = given.whole
    kinds = [whole] if whole is not None else [False] if "B" not in letters else [True]
    if whole is None and "B" in letters and letters & set("IW"):
        kinds = [False, True]
    problems, refused = [], []
    for placement in placements_of(given):
        given.check_size(len(placement))
        times = times_of(len(placement), _LETTERS, given.costs)
        for whole in kinds:
            try:
                problems.append(_problem(given, placement, times, whole))
            except NoRoom as error:
                refused.append(error)
    if not problems:
        raise refused[0]
    return problems


def placements_of(given: Given) -> list[Places]:
    """The placements to search: the given one, or else the usual ones."""
    if given.placement is not None:
        places = _placed(given.placement, given)
        if not places or set(places) != set(range(max(places) + 1)):
            raise InputError(f"placement is {places}; give each stage a device, from 0 on")
        if given.devices not in (None, max(places) + 1):
            raise InputError(
                f"placement has {max(places) + 1} devices and devices is {given.devices}; leave "
                "devices out"
            )
        return [places]
    stages, devices = given.counts
    if stages <= devices:
        return [one_each(devices)]
    usual = [tuple(s * devices // stages for s in range(stages))]
    if not stages % devices:
        usual.append(one_each(devices) * (stages // devices))
    if stages == 2 * devices:
        usual.append(vee(devices))
    return list(dict.fromkeys(usual))


def _placed(placement: Sequence[int] | Placement, given: Given) -> Places:
    if not callable(placement):
        try:
            return tuple(map(index, placement))
        except TypeError:
            raise InputError(
                f"placement is {placement!r}; give each stage a device, from 0 on, or a function "
                "such as fxpipe.vee"
            ) from None
    devices = given.counts[1]
    recipe = Recipe("search", lambda *counts: (), placement=placement)
    if copies := recipe.copies(devices):
        raise InputError(
            f"placement gives the stages the copies {copies}, and a search keeps each stage "
            "on one device; give a device for each stage"
        )
    return recipe.place(devices)


def _problem(given: Given, placement: Places, times: Times, whole: bool) -> Problem:
    stages, devices = range(len(placement)), max(placement) + 1
    saved = deferred = (1.0,) * len(placement)
    sums: tuple[float, ...] = ()
    fixed = [0.0] * devices
    sizes = given.sizes
    if given.memory is not None and sizes is not None:
        saved = tuple(float(sizes.saved.get(s, 0)) for s in stages)
        deferred = tuple(float(sizes.deferred.get(s, 0)) for s in stages)
        for s in stages:
            fixed[placement[s]] += sizes.parameters.get(s, 0) + sizes.optimizer.get(s, 0)
        if given.flush:
            sums = tuple(float(sizes.gradients.get(s, 0)) for s in stages)

    def lasting(letter: str, stage: int) -> float:
        """The time of a task: a whole backward takes as long as its halves, if costs have none."""
        if letter == "B" and not {"B", ("B", stage)} & given.costs.keys():
            return times["I", stage] + times["W", stage]
        return times[letter, stage]

    limits = given.limits(devices)
    for device, (most, always) in enumerate(zip(limits, fixed, strict=True)):
        if not most > always:
            raise NoRoom(
                f"device {device} may hold {most:g}, and its parameters and optimizer state take "
                f"{always:g}; allow more"
            )
    return Problem(
        given.microbatches,
        placement,
        tuple(lasting("F", s) for s in stages),
        tuple(lasting("B" if whole else "I", s) for s in stages),
        tuple(0.0 if whole else lasting("W", s) for s in stages),
        tuple(times["U", s] for s in stages),
        tuple(_ways(given, [(placement[s], placement[s + 1], s) for s in stages[:-1]])),
        tuple(_ways(given, [(placement[s + 1], placement[s], s) for s in stages[:-1]])),
        saved,
        tuple(0.0 for _ in stages) if whole else deferred,
        tuple(most - always for most, always in zip(limits, fixed, strict=True)),
        whole,
        given.flush,
        sums,
    )


def _ways(given: Given, pairs: list[tuple[int, int, int]]) -> Iterator[float]:
    """Yield, for each (source device, target device, stage), how long the transfer of the value
    that the stage makes takes."""
    for source, target, stage in pairs:
        if given.links is None or source == target:
            yield 0.0
            continue
        link = link_between(given.links, source, target)
        size = 0.0
        if link.bandwidth < inf:
            known = given.sizes.values if given.sizes is not None else {}
            if f"y{stage}" not in known:
                raise InputError(
                    f"a link of limited bandwidth carries what stage {stage} makes, whose size is "
                    f"not known; give sizes=Sizes(values={{'y{stage}': bytes}})"
                )
            size = known[f"y{stage}"] / link.bandwidth
        yield link.latency + size
