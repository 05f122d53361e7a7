"""What a schedule keeps between forward and backward, counted in micro-batches of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.errors import Fault, InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.verify.window import Spot, Window

StashLimit = int | Sequence[int]
"""The most that a device may keep, over all its stages; or one number for each stage."""


@dataclass(frozen=True)
class Stash:
    """The most that is kept at once, in a run of any length.

    A micro-batch counts from the begin of its forward on a stage to the end of its backward
    there; where that is in halves, to the end of the weight gradient, as the papers count.

    Attributes:
        stages: stage → micro-batches that it keeps.
        devices: device → micro-batches that all its stages keep, together.
        deferred: stage → micro-batches between input gradient and weight gradient.
        inputs: stage → micro-batches of which only the inputs are kept, until the recompute.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    deferred: tuple[int, ...]
    inputs: tuple[int, ...]


def stash_of(window: Window) -> Stash:
    """The peaks of a schedule whose tasks are all there and in order."""
    held = _held(window.schedule)
    stages, devices = [0] * window.schedule.stages, [0] * window.schedule.devices
    for spot, stage, alive in _levels(window, "F", "BW"):
        stages[stage] = max(stages[stage], alive[stage])
        together = sum([alive[each] for each in held[spot.device]])
        devices[spot.device] = max(devices[spot.device], together)
    deferred, inputs = [0] * len(stages), [0] * len(stages)
    for peaks, begin, ends in ((deferred, "I", "W"), (inputs, "F", "R")):
        for _, stage, alive in _levels(window, begin, ends):
            peaks[stage] = max(peaks[stage], alive[stage])
    return Stash(tuple(stages), tuple(devices), tuple(deferred), tuple(inputs))


def too_much(window: Window, limit: StashLimit) -> Iterator[Fault]:
    """Where each device, or each stage, first keeps more than its limit.

    Raises:
        InputError: the limit is no count, or there is not one for each stage.
    """
    limits = _checked(limit, window.schedule.stages)
    held = _held(window.schedule)
    peaks = stash_of(window)
    told: set[int] = set()
    for spot, stage, alive in _levels(window, "F", "BW"):
        if isinstance(limits, int):
            who, what, most = spot.device, "the device keeps", limits
            now, peak = sum([alive[each] for each in held[who]]), peaks.devices[who]
        else:
            who, what, most = stage, f"stage {stage} keeps", limits[stage]
            now, peak = alive[stage], peaks.stages[stage]
        if now > most and who not in told:
            told.add(who)
            yield window.fault(
                spot,
                f"{what} {now} micro-batches from here on, and {peak} at its peak; the limit is "
                f"{most}",
                f"run a backward before it, or allow {peak}",
            )


def _levels(window: Window, begin: str, ends: str) -> Iterator[tuple[Spot, int, list[int]]]:
    """Each task that begins a span, its stage, and stage → the spans that are open then.

    A span that ends for an earlier batch than it begins is open when the window starts, as often
    as there are batches between.
    """
    spots = window.spots
    alive = [0] * window.schedule.stages
    spans: set[tuple[int | None, int]] = set()
    for (kind, i, stage), spot in spots.items():
        if kind in ends and (first := spots.get((begin, i, stage))) is not None:
            spans.add((i, stage))
            alive[stage] += first.batch - spot.batch
    for (kind, i, stage), spot in spots.items():
        if kind == begin and (i, stage) in spans:
            alive[stage] += 1
            yield spot, stage, alive
        elif kind in ends:
            alive[stage] -= 1


def _held(schedule: Schedule) -> list[list[int]]:
    """Device → its stages."""
    held: list[list[int]] = [[] for _ in schedule.rows]
    for stage, device in enumerate(schedule.placement):
        held[device].append(stage)
    return held


def _checked(limit: StashLimit, stages: int) -> int | tuple[int, ...]:
    limits = limit if isinstance(limit, int) else tuple(limit)
    if isinstance(limits, tuple) and len(limits) != stages:
        raise InputError(
            f"stash_limit has {len(limits)} numbers for {stages} stages; give one for each stage, "
            "or a single one for each device"
        )
    if any(each < 0 for each in (limits if isinstance(limits, tuple) else (limits,))):
        raise InputError(f"stash_limit is {limit}; give at least 0")
    return limits
