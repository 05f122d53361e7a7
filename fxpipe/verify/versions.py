"""Weight versions of a schedule: how many live, how stale they are, and the smallest delay.

Batch t reads version max(t − delay, 0) of a stage, and its update makes version t + 1. All is
worked out where all batches exist: the first steps and the flush leave tasks out, and need and
keep no more.

While batches are in flight, a failure takes all stages back to the newest version that every one
has. So that no more buffers are needed for that, the update of batch n on a stage can wait for the
updates of batch n − d on all others. With one stage a device that is never a deadlock: behind a
stage's update of batch n come only tasks of later batches, on every stage whose tasks depend on
them those follow the first forward of batch n + 1, and that follows the update of batch n − d,
whose version it reads. Where stages have different delays no update waits, and a stage that is
ahead keeps besides what it may have to go back to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import Fault
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS
from fxpipe.verify.tasks import Spot, Window


@dataclass(frozen=True)
class Versions:
    """What a schedule's delay and order mean for the weights.

    Attributes:
        delays: stage → its delay, as the schedule says.
        smallest: stage → the smallest delay with which every version that it reads is there.
        live: stage → the most versions that are needed at once, the newest included.
        microbatches: the smallest number of micro-batches with which the delays are enough, if
            forwards run ahead of backwards by as many as here; None where more would not help.
        awaited: whether an update may wait for those of ``delay`` batches before on all stages.
    """

    delays: tuple[int, ...]
    smallest: tuple[int, ...]
    live: tuple[int, ...]
    microbatches: int | None
    awaited: bool

    @property
    def delay(self) -> int:
        """The smallest delay that one number can be, for all stages."""
        return max(self.smallest, default=0)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Stage → by how many updates the weights that a gradient was computed with are older
        than those that it is applied to, once as many batches have run."""
        return self.delays

    @property
    def consistent(self) -> bool:
        """Whether a micro-batch reads the same version on every stage."""
        return len(set(self.delays)) <= 1


def versions_of(window: Window) -> Versions:
    """The versions of a schedule whose tasks are all there and in order."""
    delays = window.schedule.delays
    stages = [_Stage(window, stage) for stage in range(len(delays))]
    return Versions(
        delays,
        tuple(stage.smallest for stage in stages),
        tuple(stage.live(delay) for stage, delay in zip(stages, delays, strict=True)),
        _microbatches(window.schedule, stages),
        _awaited(window.schedule),
    )


def too_small(window: Window) -> Iterator[Fault]:
    """Stages whose delay asks for a version that is not made yet, or never."""
    if not window.schedule.trains:
        if any(window.schedule.delays):
            yield Fault("it has a delay, and nothing updates the weights", "use delay=0")
        return
    found = versions_of(window)
    enough = f"delay={found.delay}"
    if not found.consistent:
        enough = "delay=" + ",".join(map(str, map(max, found.delays, found.smallest)))
    cure = f"use {enough}, the smallest that works"
    if found.microbatches is not None:
        cure += f", or at least {found.microbatches} micro-batches"
    for number, (delay, smallest) in enumerate(zip(found.delays, found.smallest, strict=True)):
        if delay < smallest:
            stage = _Stage(window, number)
            assert stage.first is not None and stage.update is not None
            version = f"t - {delay}" if delay else "t"
            yield window.fault(
                stage.first,
                f"delay={delay} is too small for stage {number}, which needs {smallest}: batch t "
                f"reads version {version} here, and {window.text(*stage.update[:2])}, position "
                f"{stage.update.position}, makes that only later",
                cure,
            )


class _Stage:
    """One stage's readers of weights and its update.

    Attributes:
        first: the reader for which a version must be there the earliest.
        last: the reader behind which a batch needs its version no more.
        ahead: micro-batches that have begun and not ended where a batch begins.
    """

    def __init__(self, window: Window, stage: int) -> None:
        self.update: Spot | None = None
        self.first: Spot | None = None
        self.last: Spot | None = None
        begun: dict[int | None, Spot] = {}
        ended: dict[int | None, Spot] = {}
        for _, kind, i, spot in window.by_stage[stage]:
            if kind == "U":
                self.update = spot
            elif _reads(kind) and (self.update is None or kind in BUILT_IN):
                self.first = self.first or spot
                self.last = spot
            if kind == "F":
                begun[i] = spot
            elif kind in "BW":
                ended[i] = spot
        self.smallest = self._smallest()
        self.ahead = 0
        if self.first is not None:
            # Ended by then is what ends at an earlier moment: each pair counts its batches between.
            self.ahead = sum(
                _batches(begun[i], self.first) - _batches(ended[i], self.first)
                for i in begun.keys() & ended.keys()
            )

    def _smallest(self) -> int:
        """Batch t reads version t − d, made by the update of batch t − d − 1.

        That stands before the first reader if (t − d − 1 − its batch, its position) is less than
        (t − the reader's batch, the reader's position).
        """
        if self.first is None or self.update is None:
            return 0
        steps = self.first.batch - self.update.batch
        return max(steps - (self.update.position < self.first.position), 0)

    def live(self, delay: int) -> int:
        """Right after the update that makes version n + 1, older versions whose last reader is
        still to come, and the new one. Version n − k has its last reader in batch n − k + delay.
        """
        if self.last is None or self.update is None:
            return 1
        steps = delay - self.last.batch + self.update.batch
        return 1 + max(steps + (self.last.position > self.update.position), 0)


def _awaited(schedule: Schedule) -> bool:
    """With one delay, one stage a device, and nothing of its batch behind an update."""
    one_each = len(set(schedule.placement)) == schedule.stages
    same = len(set(schedule.delays)) == 1 and min(schedule.delays) > 0
    return one_each and same and schedule.kinds <= BUILT_IN


def _batches(spot: Spot, now: Spot) -> int:
    """Up to which batch, from that of ``now``, a spot has come by at the moment of ``now``."""
    return spot.batch - now.batch - (spot.position >= now.position)


def _reads(kind: str) -> bool:
    """Whether a kind of task reads weights."""
    return kind in "FBIWR" or "parameters" in KINDS[kind].reads


def _microbatches(schedule: Schedule, stages: list[_Stage]) -> int | None:
    """With delay d the last d batches may be on their way where a batch begins: d · m ≥ ahead."""
    least = 0
    for delay, stage in zip(schedule.delays, stages, strict=True):
        if delay < stage.smallest:
            if delay == 0:
                return None
            least = max(least, -(-stage.ahead // delay))
    return least if least > schedule.microbatches else None
