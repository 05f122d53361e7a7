"""Weight versions of a schedule: how many are kept, how stale they are, and the smallest delay.

All tasks of a micro-batch of batch t on a stage read version max(t − delay, 0), and the update of
batch t makes version t + 1. All counts are for steps in which all batches exist: the first steps
and the flush leave tasks out, and so need and keep no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.errors import Fault
from fxpipe.ir.schedule import Delay, Rule, Schedule, delay_text
from fxpipe.ir.task import BUILT_IN, KINDS
from fxpipe.verify.schedule import ordered_window
from fxpipe.verify.tasks import Spot, Window


@dataclass(frozen=True)
class Versions:
    """What a schedule's delay and order mean for the weights.

    Attributes:
        delays: stage → its delay in the schedule, or those of its micro-batches.
        needed: stage → micro-batch → the smallest delay with which the version that it reads
            exists by then.
        smallest: stage → the smallest delay that works for all its micro-batches.
        enough: whether the delays are large enough that every version exists when it is read.
        live: stage → the most versions that are needed at once, the newest included.
    """

    delays: tuple[Rule, ...]
    needed: tuple[tuple[int, ...], ...]
    smallest: tuple[int, ...]
    enough: bool
    live: tuple[int, ...]

    @property
    def delay(self) -> int:
        """The smallest delay that works for all stages."""
        return max(self.smallest, default=0)

    @property
    def staleness(self) -> tuple[Rule, ...]:
        """Stage → how many updates lie between the weights that a gradient was computed with and
        those to which it is applied, after the first steps; or that of each micro-batch."""
        return self.delays

    @property
    def consistent(self) -> bool:
        """Whether a micro-batch reads the same version on every stage."""
        return len(set(self.delays)) <= 1


def schedule_versions(schedule: Schedule) -> Versions:
    """Work out what the delay and the order mean for the weights. The delay may be too small.

    Raises:
        VerificationError: something else is wrong with the schedule.
    """
    return _versions(ordered_window(schedule))[0]


def _versions(window: Window) -> tuple[Versions, list[_Stage]]:
    schedule = window.schedule
    stages = [_Stage(window, stage) for stage in range(schedule.stages)]
    every = range(schedule.microbatches)
    versions = Versions(
        schedule.rules,
        tuple(tuple(stage.needed.get(i, 0) for i in every) for stage in stages),
        tuple(stage.smallest for stage in stages),
        all(
            schedule.delay_of(number, i) >= needed
            for number, stage in enumerate(stages)
            for i, needed in stage.needed.items()
        ),
        tuple(stage.live for stage in stages),
    )
    return versions, stages


def too_small(window: Window) -> Iterator[Fault]:
    """Report stages whose delay is too small: batches would read versions that do not exist yet.

    Where the micro-batches of a stage have delays of their own, report each that is too small.
    """
    schedule = window.schedule
    if not schedule.trains:
        if any(schedule.delays):
            yield Fault("it has a delay, and nothing updates the weights", "use delay=0")
        return
    versions, stages = _versions(window)
    for number, stage in enumerate(stages):
        apart = isinstance(versions.delays[number], tuple)
        for i, first in stage.first.items():
            delay, needed = schedule.delay_of(number, i), stage.needed[i]
            if delay >= needed:
                continue
            assert stage.update is not None
            of = f"micro-batch {i} on " if apart and i is not None else ""
            version = f"t - {delay}" if delay else "t"
            cure = f"use delay={delay_text(_enough(schedule, versions))}, the smallest that works"
            yield window.fault(
                first,
                f"delay={delay} is too small for {of}stage {number}, which needs {needed}: batch t "
                f"reads version {version} here, and {window.text(*stage.update[:2])}, position "
                f"{stage.update.position}, makes that only later",
                cure,
            )
            if not apart:
                break  # later readers need no larger delay


def _enough(schedule: Schedule, versions: Versions) -> Delay:
    """The smallest delay that works and is no less than the schedule's, in the same form."""
    if versions.consistent and not isinstance(versions.delays[0], tuple):
        return versions.delay
    return tuple(
        tuple(max(schedule.delay_of(stage, i), least) for i, least in enumerate(needed))
        if isinstance(rule, tuple)
        else max(rule, smallest)
        for stage, (rule, needed, smallest) in enumerate(
            zip(versions.delays, versions.needed, versions.smallest, strict=True)
        )
    )


class _Stage:
    """The readers of one stage's weights, and its update.

    Attributes:
        update: the spot of the update, if there is one.
        first: micro-batch, or None for a task once a step → the first reader of its version, in the
            order of a batch.
        last: micro-batch, or None → the last reader of its version.
        needed: micro-batch, or None → the smallest delay with which the version exists in time.
        live: the most versions that are needed at once.
    """

    def __init__(self, window: Window, stage: int) -> None:
        self.update: Spot | None = None
        self.first: dict[int | None, Spot] = {}
        self.last: dict[int | None, Spot] = {}
        for _, kind, i, spot in window.by_stage[stage]:
            if kind == "U":
                self.update = spot
            elif _reads(kind) and (self.update is None or kind in BUILT_IN):
                self.first.setdefault(i, spot)
                self.last[i] = spot
        self.needed = {i: self._needed(spot) for i, spot in self.first.items()}
        delay_of = window.schedule.delay_of
        older = [self._older(spot, delay_of(stage, i)) for i, spot in self.last.items()]
        self.live = 1 + max(older, default=0)

    @property
    def smallest(self) -> int:
        """The delay with which every version exists in time."""
        return max(self.needed.values(), default=0)

    def _needed(self, reader: Spot) -> int:
        """The smallest delay d with which a reader's version exists.

        Batch t reads version t − d, made by the update of batch t − d − 1. That comes before the
        reader if (t − d − 1 − its batch, its position) < (t − reader's batch, reader's position).
        """
        if self.update is None:
            return 0
        steps = reader.batch - self.update.batch
        return max(steps - (self.update.position < reader.position), 0)

    def _older(self, reader: Spot, delay: int) -> int:
        """How many versions older than the newest a reader may still need right after an update.

        It reads version n − k in batch n − k + delay.
        """
        if self.update is None:
            return 0
        steps = delay - reader.batch + self.update.batch
        return max(steps + (reader.position > self.update.position), 0)


def _reads(kind: str) -> bool:
    return kind in "FBIWR" or "parameters" in KINDS[kind].reads


def end_with_flush(schedule: Schedule) -> Schedule:
    """Put all tasks of a batch into one step, in the order in which the batch meets them.

    Before, on four devices with a delay of 1, for which two micro-batches are too few::

        0: F0 B1'' U'' F1 B0'

    after::

        0: F0 F1 B0 B1 U

    The tasks of a pair come apart.
    """
    rows = tuple(
        tuple(replace(task, batch=0) for task in sorted(row, key=lambda task: -task.batch))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows, paired=frozenset())
