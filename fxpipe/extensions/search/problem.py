"""The problem that a search solves: times, placement, memory, and which time to minimize."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

Order = tuple[tuple[int, ...], ...]
"""Device → its tasks in order, each as 3 × stage + kind: 0 for a forward, 1 for an input gradient,
2 for a weight gradient. The micro-batches of each stage and kind come in order, so their numbers
are left out."""

LETTERS = "FIW"


class NoRoom(InputError):
    """A device has no room for one micro-batch."""


@dataclass(frozen=True)
class Problem:
    """A chain of stages, and what a schedule for one step of it must keep to.

    A device may hold several stages. A forward starts when the micro-batch has arrived from the
    stage before, an input gradient when it has arrived from the stage after, and a weight gradient
    after its input gradient. A whole backward counts as an input gradient without a weight
    gradient. A device's updates come last; with a flush, all devices wait for one another before
    them. Transfers do not wait for one another.

    A forward takes ``saved`` of memory at its start. The input gradient releases all of it but
    ``deferred``, which is a part of it, and the weight gradient releases that: as in zero-bubble's
    instances, where the memory of the three kinds of tasks adds up to 0. The first weight gradient
    of a stage also takes ``sums`` at its start, until the update.

    Attributes:
        microbatches: how many a step has.
        placement: stage → device.
        forward: stage → time of a micro-batch's forward.
        backward: stage → time of its input gradient, or, where ``whole``, of its backward.
        weight: stage → time of its weight gradient; 0 where ``whole``.
        update: stage → time of its update.
        down: stage → time of the transfer of a forward's output to the next stage.
        up: stage → time of the transfer of a gradient from the next stage to this one.
        saved: stage → memory that a forward keeps for a micro-batch.
        deferred: stage → memory that is left for the weight gradient; 0 where ``whole``.
        sums: stage → memory of its sums of gradients. Bounds leave them out.
        memory: device → the most that it may keep for its micro-batches.
        whole: whether backwards are in one piece.
        flush: whether to minimize the time of one step, from its first task to its last. Otherwise
            batches overlap, with weights that are one version old, and the time of each of many
            steps is minimized: the longest that a device takes from its first task to its last.
    """

    microbatches: int
    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    update: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    saved: tuple[float, ...]
    deferred: tuple[float, ...]
    memory: tuple[float, ...]
    whole: bool = False
    flush: bool = True
    sums: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for device, least in enumerate(self.least_memory):
            if self.memory[device] < least:
                raise NoRoom(
                    f"device {device} may keep {self.memory[device]:g}, and one micro-batch takes "
                    f"{least:g} there; give it at least that, or recompute"
                )

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def devices(self) -> int:
        return len(self.memory)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Device → its stages, in order."""
        return tuple(
            tuple(s for s, home in enumerate(self.placement) if home == device)
            for device in range(self.devices)
        )

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Kind of task, numbered as in an ``Order`` → its time."""
        stages = zip(self.forward, self.backward, self.weight, strict=True)
        return tuple(time for stage in stages for time in stage)

    @cached_property
    def takes(self) -> tuple[float, ...]:
        """Kind of task → the memory that it takes, negative for what it frees."""
        sizes = zip(self.saved, self.deferred, strict=True)
        return tuple(more for f, left in sizes for more in (f, left - f, -left))

    def begins(self, code: int, i: int) -> float:
        """The memory that a task takes beyond that at its start: of sums of gradients."""
        stage, kind = divmod(code, 3)
        return self.sums[stage] if self.sums and not i and kind == 2 - self.whole else 0.0

    @cached_property
    def summing(self) -> tuple[float, ...]:
        """Device → the memory of its stages' sums of gradients."""
        sums = self.sums or (0.0,) * self.stages
        return tuple(sum(sums[s] for s in stages) for stages in self.held)

    @cached_property
    def keeps(self) -> tuple[float, ...]:
        """Stage → the most memory that a micro-batch takes there at any time."""
        return tuple(map(max, self.saved, self.deferred))

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """Device → the memory that one micro-batch takes on all of its stages together."""
        least = [0.0] * len(self.memory)
        for keep, home in zip(self.keeps, self.placement, strict=True):
            least[home] += keep
        return tuple(least)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Device → the time that it computes in a step, without updates."""
        times = [self.microbatches * sum(self.times[3 * s : 3 * s + 3]) for s in range(self.stages)]
        return tuple(sum(times[s] for s in stages) for stages in self.held)

    @cached_property
    def last(self) -> tuple[float, ...]:
        """Device → the time of its updates; with a flush, the longest of all devices."""
        times = tuple(sum(self.update[s] for s in stages) for stages in self.held)
        return (max(times),) * len(times) if self.flush else times

    def schedule_of(self, order: Order) -> Schedule:
        """The Schedule that computes in this order."""
        rows = []
        for codes, stages in zip(order, self.held, strict=True):
            row: list[Task] = []
            begun: Counter[int] = Counter()
            for code in codes:
                stage, kind = divmod(code, 3)
                letter = "B" if self.whole and kind == 1 else LETTERS[kind]
                row.append(Task(letter, begun[code], stage))
                begun[code] += 1
            rows.append((*row, *(Task("U", None, stage) for stage in stages)))
        delay = 0 if self.flush else 1
        return Schedule("search", self.microbatches, self.placement, tuple(rows), delay)

    def order_of(self, schedule: Schedule) -> Order | None:
        """The order of a schedule's forwards and backwards, or None if it has others than this
        problem.

        Backwards are split into halves, or halves put together, as the problem asks.
        """
        order = []
        for row, stages in zip(schedule.rows, self.held, strict=True):
            kinds = (0, 1) if self.whole else (0, 1, 2)
            numbers_of: dict[int, list[int]] = {3 * s + kind: [] for s in stages for kind in kinds}
            codes = []
            for task in row:
                for kind in self._kinds(task.kind):
                    code = 3 * (task.stage or 0) + kind
                    numbers_of.setdefault(code, []).append(task.microbatch or 0)
                    codes.append(code)
            if any(numbers != list(range(self.microbatches)) for numbers in numbers_of.values()):
                return None
            order.append(tuple(codes))
        return tuple(order)

    def _kinds(self, letter: str) -> tuple[int, ...]:
        if letter == "B" and not self.whole:
            return (1, 2)
        if letter == "W" and self.whole:
            return ()
        return {"F": (0,), "B": (1,), "I": (1,), "W": (2,)}.get(letter, ())
