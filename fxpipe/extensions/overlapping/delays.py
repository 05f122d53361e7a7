"""Weight versions of a schedule: how many are kept, how stale they are, and the smallest delay.

All tasks of a micro-batch of batch t on a stage read version max(t − delay, 0), and the update of
batch t makes version t + 1. All counts are for steps in which all batches exist: the first steps
and the flush leave tasks out, and so need and keep no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.errors import Fault
from fxpipe.ir.schedule import Schedule, delay_text
from fxpipe.ir.task import BUILT_IN, KINDS
from fxpipe.verify.schedule import ordered_window
from fxpipe.verify.tasks import Spot, Window


@dataclass(frozen=True)
class Versions:
    """What a schedule's delay and order mean for the weights.

    Attributes:
        delays: stage → its delay in the schedule.
        smallest: stage → the smallest delay with which every version that it reads exists by then.
        live: stage → the most versions that are needed at once, the newest included.
    """

    delays: tuple[int, ...]
    smallest: tuple[int, ...]
    live: tuple[int, ...]

    @property
    def delay(self) -> int:
        """The smallest delay that works for all stages."""
        return max(self.smallest, default=0)

    @property
    def enough(self) -> bool:
        """Whether the delays are large enough that every version exists when it is read."""
        return all(d >= least for d, least in zip(self.delays, self.smallest, strict=True))

    @property
    def staleness(self) -> tuple[int, ...]:
        """Stage → how many updates lie between the weights that a gradient was computed with and
        those to which it is applied, after the first steps."""
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
    return _versions(ordered_window(schedule))


def _versions(window: Window) -> Versions:
    schedule = window.schedule
    stages = [_Stage(window, stage) for stage in range(schedule.stages)]
    return Versions(
        schedule.delays,
        tuple(max(map(stage.needed, stage.readers), default=0) for stage in stages),
        tuple(
            1 + max((stage.older(spot, delay) for spot in stage.readers), default=0)
            for stage, delay in zip(stages, schedule.delays, strict=True)
        ),
    )


def too_small(window: Window) -> Iterator[Fault]:
    """Report stages whose delay is too small: batches would read versions that do not exist yet."""
    schedule = window.schedule
    if not schedule.trains:
        if any(schedule.delays):
            yield Fault("it has a delay, and nothing updates the weights", "use delay=0")
        return
    versions = _versions(window)
    enough = (
        versions.delay
        if versions.consistent
        else tuple(map(max, versions.delays, versions.smallest))
    )
    for number, delay in enumerate(schedule.delays):
        stage = _Stage(window, number)
        # later readers need no larger delay
        first = next((spot for spot in stage.readers if stage.needed(spot) > delay), None)
        if first is not None:
            assert stage.update is not None
            version = f"t - {delay}" if delay else "t"
            yield window.fault(
                first,
                f"delay={delay} is too small for stage {number}, which needs "
                f"{stage.needed(first)}: batch t reads version {version} here, and "
                f"{window.text(*stage.update[:2])}, position {stage.update.position}, makes that "
                "only later",
                f"use delay={delay_text(enough)}, the smallest that works",
            )


class _Stage:
    """The readers of one stage's weights, and its update.

    Attributes:
        update: the spot of the update, if there is one.
        readers: the spots of the tasks that read a version, in the order of a batch.
    """

    def __init__(self, window: Window, stage: int) -> None:
        self.update: Spot | None = None
        self.readers: list[Spot] = []
        for _, kind, _, spot in window.by_stage[stage]:
            if kind == "U":
                self.update = spot
            elif _reads(kind) and (self.update is None or kind in BUILT_IN):
                self.readers.append(spot)

    def needed(self, reader: Spot) -> int:
        """The smallest delay d with which a reader's version exists.

        Batch t reads version t − d, made by the update of batch t − d − 1. That comes before the
        reader if (t − d − 1 − its batch, its position) < (t − reader's batch, reader's position).
        """
        if self.update is None:
            return 0
        steps = reader.batch - self.update.batch
        return max(steps - (self.update.position < reader.position), 0)

    def older(self, reader: Spot, delay: int) -> int:
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
