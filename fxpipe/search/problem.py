"""The problem that a search solves: times, placement, memory, and what is to be least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

Order = tuple[tuple[int, ...], ...]
"""Device → its tasks, each as 3 × stage + 0 for a forward, 1 for an input gradient, 2 for a weight
gradient. The micro-batches of each stage and kind come in order, so their numbers are left out.
Where batches mix, a task of k batches before has 3 × k × stages added."""

LETTERS = "FIW"


@dataclass(frozen=True)
class Problem:
    """What a schedule is searched for: a chain of stages, and one step of it.

    A device may hold several stages. A forward on a stage begins when the same micro-batch has come
    from the stage before, an input gradient when it has come from the stage behind, and a weight
    gradient after its input gradient. A whole backward counts as an input gradient, with nothing
    left for a weight gradient. A device's updates come last; with a flush, all devices wait for
    one another before them. Transfers do not wait for one another.

    A forward holds its stage's ``saved`` from its start; at the end of the input gradient
    ``deferred`` is left of it, and nothing at the end of the weight gradient.

    Attributes:
        microbatches: of the step.
        placement: stage → device.
        forward: stage → time of a micro-batch's forward.
        backward: stage → time of its input gradient, or, where ``whole``, of its backward.
        weight: stage → time of its weight gradient; 0 where ``whole``.
        update: stage → time of its update.
        down: stage → time until what its forward makes is at the stage behind it.
        up: stage → time until what the stage behind it hands back is there.
        saved: stage → memory that a forward keeps.
        deferred: stage → memory that is left for the weight gradient; 0 where ``whole``.
        memory: device → the most that it may keep for its micro-batches.
        whole: whether backwards are in one piece.
        flush: whether the time of one step is to be least, from its first task to its last. Else
            batches overlap, with weights that are one version old, and the time of each of many
            steps is to be least: the longest that a device takes from its first task to its last.
        delay: where batches may also mix on a device, by how many versions the weights that they
            read may be behind at most; else 0. A stage then updates right after the last weight
            gradient of a batch.
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
    delay: int = 0

    def __post_init__(self) -> None:
        for device, least in enumerate(self.least_memory):
            if self.memory[device] < least:
                raise InputError(
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
    def took(self) -> tuple[float, ...]:
        """Kind of task, as in an ``Order`` → its time."""
        each = zip(self.forward, self.backward, self.weight, strict=True)
        return tuple(time for times in each for time in times)

    @cached_property
    def keeps(self) -> tuple[float, ...]:
        """Stage → the most that a micro-batch takes between its forward and its last task."""
        return tuple(map(max, self.saved, self.deferred))

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """Device → what one micro-batch takes that is on all of its stages."""
        least = [0.0] * len(self.memory)
        for keep, home in zip(self.keeps, self.placement, strict=True):
            least[home] += keep
        return tuple(least)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Device → the time that it computes in a step, updates left out."""
        times = [self.microbatches * sum(self.took[3 * s : 3 * s + 3]) for s in range(self.stages)]
        return tuple(sum(times[s] for s in own) for own in self.held)

    @cached_property
    def last(self) -> tuple[float, ...]:
        """Device → the time from its last weight gradient until updates are done: of all devices
        with a flush, else of its own."""
        own = tuple(sum(self.update[s] for s in stages) for stages in self.held)
        return (max(own),) * len(own) if self.flush else own

    def schedule_of(self, order: Order) -> Schedule:
        """The Schedule that computes in this order."""
        rows = []
        for own, stages in zip(order, self.held, strict=True):
            row: list[Task] = []
            begun = self.begun(own)
            for entry in own:
                back, code = divmod(entry, 3 * self.stages)
                stage, kind = divmod(code, 3)
                letter = "B" if self.whole and kind == 1 else LETTERS[kind]
                i, begun[code] = begun[code] % self.microbatches, begun[code] + 1
                row.append(Task(letter, i, stage, -back))
                if self.delay and i == self.microbatches - 1 and letter in "BW":
                    row.append(Task("U", None, stage, -back))
            if not self.delay:
                row += [Task("U", None, stage) for stage in stages]
            rows.append(tuple(row))
        delay = 0 if self.flush else 1
        made = Schedule("search", self.microbatches, self.placement, tuple(rows), delay)
        return replace(made, delay=max(1, made.versions().delay)) if self.delay else made

    def begun(self, own: Sequence[int]) -> dict[int, int]:
        """Kind of task → the first micro-batch in a device's tasks, counted from this batch on: if
        it is of an earlier one, below 0."""
        begun: dict[int, int] = {}
        for entry in own:
            back, code = divmod(entry, 3 * self.stages)
            begun[code] = begun.get(code, 0) - back
        return begun

    def order_of(self, schedule: Schedule) -> Order | None:
        """The order in which a schedule's forwards and backwards come, if it is of this problem.

        A backward stands for its two halves, or the first half for a backward.
        """
        order = []
        for row, own in zip(schedule.rows, self.held, strict=True):
            kinds = (0, 1) if self.whole else (0, 1, 2)
            found: dict[int, list[int]] = {3 * s + kind: [] for s in own for kind in kinds}
            entries = []
            for task in row:
                for kind in self._kinds(task.kind):
                    code = 3 * (task.stage or 0) + kind
                    number = self.microbatches * task.batch + (task.microbatch or 0)
                    found.setdefault(code, []).append(number)
                    entries.append(code - 3 * self.stages * task.batch)
            begun = self.begun(entries)
            for code, numbers in found.items():
                first = begun.get(code, 0)
                if numbers != list(range(first, first + self.microbatches)):
                    return None
            order.append(tuple(entries))
        return tuple(order)

    def _kinds(self, letter: str) -> tuple[int, ...]:
        if letter == "B" and not self.whole:
            return (1, 2)
        if letter == "W" and self.whole:
            return ()
        return {"F": (0,), "B": (1,), "I": (1,), "W": (2,)}.get(letter, ())
