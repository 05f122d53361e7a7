"""Counts of the micro-batches that a schedule keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.ir.schedule import Schedule
from fxpipe.verify.schedule import ordered_window
from fxpipe.verify.tasks import Spot, Window


@dataclass(frozen=True)
class KeptCounts:
    """The most micro-batches that are kept at once, in a run of any length.

    A micro-batch counts on a stage from the start of its forward, or, if it has one, of its
    recompute, to the end of its backward, or, if that is halved, of its weight gradient, as the
    papers count; of its input gradient where weight gradients are frozen.

    Attributes:
        stages: stage → the micro-batches that it keeps.
        devices: device → the micro-batches that all its stages keep together.
        deferred: stage → the micro-batches between input gradient and weight gradient.
        inputs: stage → the micro-batches of which only the inputs are kept, until the recompute.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    deferred: tuple[int, ...]
    inputs: tuple[int, ...]


def schedule_kept(schedule: Schedule) -> KeptCounts:
    """Count the micro-batches that are kept between forward and backward.

    Raises:
        VerificationError: tasks are missing, or not in order.
    """
    return kept_of(ordered_window(schedule))


def kept_of(window: Window) -> KeptCounts:
    """Count what is kept by a schedule whose tasks are complete and in order."""
    devices = [0] * window.schedule.devices
    peaks: list[list[int]] = []
    for begin, ends in ("RF", "BW"), ("I", "W"), ("F", "R"):
        stages = [0] * window.schedule.stages
        peaks.append(stages)
        for spot, stage, kept, in_all in _levels(window, begin, ends):
            stages[stage] = max(stages[stage], kept)
            if ends == "BW":
                devices[spot.device] = max(devices[spot.device], in_all)
    whole, deferred, inputs = map(tuple, peaks)
    return KeptCounts(whole, tuple(devices), deferred, inputs)


def _levels(window: Window, begin: str, ends: str) -> Iterator[tuple[Spot, int, int, int]]:
    """Yield each task that begins a span, its stage, and how many spans are open from then on: of
    that stage, and of all stages of the device.

    A span lasts from the first of ``begin`` that its micro-batch has to one of ``ends``. If its end
    runs for an earlier batch than its begin, it is already open when the window starts, once for
    each batch between.
    """
    spots, frozen = window.spots, window.schedule.frozen

    def ended(kind: str, i: int | None, stage: int) -> bool:
        return kind in ends or (kind == "I" and "B" in ends and (i, stage) in frozen)

    kept, in_all = [0] * window.schedule.stages, [0] * window.schedule.devices
    spans: set[tuple[str, int | None, int]] = set()
    for (kind, i, stage), spot in spots.items():
        starts = [(letter, i, stage) for letter in begin if (letter, i, stage) in spots]
        if ended(kind, i, stage) and starts:
            spans.add(starts[0])
            kept[stage] += spots[starts[0]].batch - spot.batch
            in_all[spot.device] += spots[starts[0]].batch - spot.batch
    for (kind, i, stage), spot in spots.items():
        begins = (kind, i, stage) in spans
        if begins or ended(kind, i, stage):
            kept[stage] += 1 if begins else -1
            in_all[spot.device] += 1 if begins else -1
        if begins:
            yield spot, stage, kept[stage], in_all[spot.device]
