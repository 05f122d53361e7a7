"""Weight versions of a schedule: how many live, how stale they are, and the smallest delay.

A micro-batch of batch t reads version max(t − delay, 0) of a stage in all its tasks there, and the
update of batch t makes version t + 1. All is worked out where all batches exist: the first steps
and the flush leave tasks out, and need and keep no more.

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
from fxpipe.ir.schedule import Delay, Rule, Schedule, delay_text
from fxpipe.ir.task import BUILT_IN, KINDS
from fxpipe.verify.tasks import Spot, Window


@dataclass(frozen=True)
class Versions:
    """What a schedule's delay and order mean for the weights.

    Attributes:
        delays: stage → its delay, as the schedule says; or those of its micro-batches.
        needed: stage → micro-batch → the smallest delay with which the version that it reads is
            there.
        smallest: stage → the smallest delay that one number can be, for all its micro-batches.
        enough: whether the delays are so great that every version is there that is read.
        live: stage → the most versions that are needed at once, the newest included.
        microbatches: the smallest number of micro-batches with which the delays are enough, if
            forwards run ahead of backwards by as many as here; None where more would not help.
        awaited: whether an update may wait for those of ``delay`` batches before on all stages.
    """

    delays: tuple[Rule, ...]
    needed: tuple[tuple[int, ...], ...]
    smallest: tuple[int, ...]
    enough: bool
    live: tuple[int, ...]
    microbatches: int | None
    awaited: bool

    @property
    def delay(self) -> int:
        """The smallest delay that one number can be, for all stages."""
        return max(self.smallest, default=0)

    @property
    def staleness(self) -> tuple[Rule, ...]:
        """Stage → by how many updates the weights that a gradient was computed with are older
        than those that it is applied to, once as many batches have run; or micro-batch after
        micro-batch, where theirs differ."""
        return self.delays

    @property
    def consistent(self) -> bool:
        """Whether a micro-batch reads the same version on every stage."""
        return len(set(self.delays)) <= 1


def versions_of(window: Window) -> Versions:
    """The versions of a schedule whose tasks are all there and in order."""
    return _versions(window)[0]


def _versions(window: Window) -> tuple[Versions, list[_Stage]]:
    """The same, and what it is of."""
    schedule = window.schedule
    stages = [_Stage(window, stage) for stage in range(schedule.stages)]
    every = range(schedule.microbatches)
    found = Versions(
        schedule.rules,
        tuple(tuple(stage.needed.get(i, 0) for i in every) for stage in stages),
        tuple(stage.smallest for stage in stages),
        all(
            schedule.delay_of(number, i) >= needed
            for number, stage in enumerate(stages)
            for i, needed in stage.needed.items()
        ),
        tuple(stage.live for stage in stages),
        _microbatches(schedule, stages),
        _awaited(schedule),
    )
    return found, stages


def too_small(window: Window) -> Iterator[Fault]:
    """Stages whose delay asks for a version that is not made yet, or never.

    Where the micro-batches of a stage have different delays, each of those that is too small.
    """
    schedule = window.schedule
    if not schedule.trains:
        if any(schedule.delays):
            yield Fault("it has a delay, and nothing updates the weights", "use delay=0")
        return
    found, stages = _versions(window)
    for number, stage in enumerate(stages):
        apart = isinstance(found.delays[number], tuple)
        for i, first in stage.first.items():
            delay, needed = schedule.delay_of(number, i), stage.needed[i]
            if delay >= needed:
                continue
            assert stage.update is not None
            of = f"micro-batch {i} on " if apart and i is not None else ""
            version = f"t - {delay}" if delay else "t"
            cure = f"use delay={delay_text(_enough(schedule, found))}, the smallest that works"
            if found.microbatches is not None:
                cure += f", or at least {found.microbatches} micro-batches"
            yield window.fault(
                first,
                f"delay={delay} is too small for {of}stage {number}, which needs {needed}: batch t "
                f"reads version {version} here, and {window.text(*stage.update[:2])}, position "
                f"{stage.update.position}, makes that only later",
                cure,
            )
            if not apart:
                break  # those that read later need no more


def _enough(schedule: Schedule, found: Versions) -> Delay:
    """The smallest delay that is enough and no less than the schedule's, in the same form."""
    if found.consistent and not isinstance(found.delays[0], tuple):
        return found.delay
    return tuple(
        tuple(max(schedule.delay_of(stage, i), needed) for i, needed in enumerate(each))
        if isinstance(rule, tuple)
        else max(rule, smallest)
        for stage, (rule, each, smallest) in enumerate(
            zip(found.delays, found.needed, found.smallest, strict=True)
        )
    )


class _Stage:
    """One stage's readers of weights and its update.

    Attributes:
        update: where it is, if it is there.
        first: micro-batch, or None for what reads once a step → the reader for which its version
            must be there the earliest; in the order of a batch.
        last: the same → the reader behind which a batch needs that version no more.
        needed: the same → the smallest delay with which that version is there.
        live: the most versions that are needed at once.
        ahead: micro-batches that have begun and not ended where a batch begins.
    """

    def __init__(self, window: Window, stage: int) -> None:
        self.update: Spot | None = None
        self.first: dict[int | None, Spot] = {}
        self.last: dict[int | None, Spot] = {}
        begun: dict[int | None, Spot] = {}
        ended: dict[int | None, Spot] = {}
        for _, kind, i, spot in window.by_stage[stage]:
            if kind == "U":
                self.update = spot
            elif _reads(kind) and (self.update is None or kind in BUILT_IN):
                self.first.setdefault(i, spot)
                self.last[i] = spot
            if kind == "F":
                begun[i] = spot
            elif kind in "BW":
                ended[i] = spot
        self.needed = {i: self._needed(spot) for i, spot in self.first.items()}
        delay_of = window.schedule.delay_of
        older = [self._older(spot, delay_of(stage, i)) for i, spot in self.last.items()]
        self.live = 1 + max(older, default=0)
        self.ahead = 0
        if self.first:
            # Ended by then is what ends at an earlier moment: each pair counts its batches between.
            now = next(iter(self.first.values()))
            self.ahead = sum(
                _batches(begun[i], now) - _batches(ended[i], now)
                for i in begun.keys() & ended.keys()
            )

    @property
    def smallest(self) -> int:
        """The delay that all need who read: the first to read needs the greatest."""
        return max(self.needed.values(), default=0)

    def _needed(self, reader: Spot) -> int:
        """Batch t reads version t − d, made by the update of batch t − d − 1.

        That stands before the reader if (t − d − 1 − its batch, its position) is less than
        (t − the reader's batch, the reader's position).
        """
        if self.update is None:
            return 0
        steps = reader.batch - self.update.batch
        return max(steps - (self.update.position < reader.position), 0)

    def _older(self, reader: Spot, delay: int) -> int:
        """How many versions older than version n + 1 a reader keeps alive right after the update
        that makes that one: it reads version n − k in batch n − k + delay.
        """
        if self.update is None:
            return 0
        steps = delay - reader.batch + self.update.batch
        return max(steps + (reader.position > self.update.position), 0)


def _awaited(schedule: Schedule) -> bool:
    """With one delay, one stage a device, and nothing of its batch behind an update."""
    one_each = len(set(schedule.placement)) == schedule.stages
    same = len({*schedule.rules, *schedule.delays}) == 1 and min(schedule.delays) > 0
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
    for delay, stage in zip(schedule.rules, stages, strict=True):
        if isinstance(delay, tuple):
            return None  # it is for as many micro-batches as there are
        if delay < stage.smallest:
            if delay == 0:
                return None
            least = max(least, -(-stage.ahead // delay))
    return least if least > schedule.microbatches else None
