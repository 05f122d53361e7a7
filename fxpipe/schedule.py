"""The Schedule: per device an ordered list of compute tasks, and where the stages are.

Only compute is written here. Communication, stash, frees and versions are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import InputError, near

if TYPE_CHECKING:
    from fxpipe.draw.picture import Picture


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of compute task.

    Attributes:
        letter: its letter in text and pictures.
        name: its name in messages.
        per_microbatch: False for a task that comes once a step and stage.
        follows: letters of the tasks of the same stage and micro-batch that must come before it;
            a task that is absent from the schedule does not count.
        flow: 1 where it comes after the same task of the stage before, -1 where after that of
            the stage behind, 0 where stages are independent.
    """

    letter: str
    name: str
    per_microbatch: bool
    follows: str
    flow: int = 0


KINDS: dict[str, TaskKind] = {
    kind.letter: kind
    for kind in (
        TaskKind("F", "forward", True, "", flow=1),
        TaskKind("B", "backward", True, "F", flow=-1),
        TaskKind("U", "update", False, "FB"),
    )
}


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of compute: a kind, a micro-batch and a stage.

    Attributes:
        kind: a letter of KINDS.
        microbatch: index in its batch, from 0; None for a task once a step.
        stage: the stage; None while an author leaves it out, never None in a Schedule.
        batch: 0 for this step's batch, −1 for the one before it, and so on.
    """

    kind: str
    microbatch: int | None = None
    stage: int | None = None
    batch: int = 0

    def __str__(self) -> str:
        index = "" if self.microbatch is None else str(self.microbatch)
        at = "" if self.stage is None else f"@{self.stage}"
        # A later batch than this step's is always wrong, and has no text that can be parsed.
        batch = "'" * -self.batch + "+" * self.batch
        return f"{self.kind}{index}{batch}{at}"


def F(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Forward of a micro-batch; the stage may be left out where the device holds one."""
    return Task("F", microbatch, stage, batch)


def B(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Backward of a micro-batch: input and parameter gradients."""
    return Task("B", microbatch, stage, batch)


def U(stage: int | None = None) -> Task:
    """Update of a stage's parameters from the gradients of the batch."""
    return Task("U", None, stage)


@dataclass(frozen=True)
class Schedule:
    """What every device computes in one step, in order.

    Attributes:
        name: for people.
        microbatches: micro-batches a step, m.
        placement: stage → device; its length is the number of stages.
        rows: device → its tasks in order, each with its stage.
        delay: batch t reads weight version max(t − delay, 0).
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Task, ...], ...]
    delay: int = 0

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def trains(self) -> bool:
        """False for a schedule of forwards alone."""
        return any(task.kind != "F" for row in self.rows for task in row)

    def held_by(self, device: int) -> tuple[int, ...]:
        """The stages on a device, in order."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == device)

    def __str__(self) -> str:
        """Text that ``Schedule.parse`` reads back to an equal value."""
        from fxpipe.text.schedule import print_schedule

        return print_schedule(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read a schedule's text. Raises ParseError with line and column."""
        from fxpipe.text.schedule import parse_schedule

        return parse_schedule(text)

    def verify(self) -> Schedule:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.schedule import verify_schedule

        return verify_schedule(self)

    def draw(self) -> Picture:
        """The schedule as a picture: devices as rows, time to the right."""
        from fxpipe.draw.schedule import draw_schedule

        return draw_schedule(self)


Rows = Callable[[int, int, int], Iterable[Task]]
"""What an author writes: ``(device, devices, microbatches)`` → the device's tasks in order."""

_TASKS_PER_STAGE_AND_MICROBATCH = 16


@dataclass(frozen=True)
class Recipe:
    """A named way to make a Schedule for any number of devices and micro-batches.

    Attributes:
        name: the name that ``fxpipe.compile(schedule=...)`` takes.
        tasks: the author's generator.
        delay: the version rule of the schedules that it makes.
    """

    name: str
    tasks: Rows
    delay: int = 0

    def __call__(self, devices: int, microbatches: int) -> Schedule:
        """Make the schedule, one stage a device. It is not verified yet.

        Raises:
            InputError: a count is below 1, the generator yields something that is not a task, or
                it does not end.
        """
        for word, count in (("devices", devices), ("microbatches", microbatches)):
            if count < 1:
                raise InputError(f"{word} is {count}; a schedule needs at least 1")
        rows = tuple(tuple(self._row(device, devices, microbatches)) for device in range(devices))
        return Schedule(self.name, microbatches, tuple(range(devices)), rows, self.delay)

    def _row(self, device: int, devices: int, microbatches: int) -> Iterator[Task]:
        bound = _TASKS_PER_STAGE_AND_MICROBATCH * (microbatches + 1)
        for position, task in enumerate(self._tasks(device, devices, microbatches)):
            where = f"schedule {self.name!r}, device {device}, position {position}"
            if position == bound:
                raise InputError(
                    f"{where}: more than {bound} tasks for {microbatches} micro-batches; "
                    "let the generator end"
                )
            if not isinstance(task, Task):
                raise InputError(f"{where}: got {task!r}; yield tasks such as F(0), B(0) or U()")
            stage = device if task.stage is None else task.stage
            yield Task(task.kind, task.microbatch, stage, task.batch)

    def _tasks(self, device: int, devices: int, microbatches: int) -> Iterator[Task]:
        """What the author's function gives; what it raises is told as its own."""
        try:
            yield from self.tasks(device, devices, microbatches)
        except Exception as error:
            raise InputError(
                f"schedule {self.name!r} fails for device {device} of {devices} and "
                f"{microbatches} micro-batches ({type(error).__name__}: {error}); let the function "
                "(device, devices, microbatches) yield tasks such as F(0), B(0) or U()"
            ) from error


RECIPES: dict[str, Recipe] = {}
"""Every registered recipe by name; ``fxpipe.schedules`` fills in the library's own."""


def schedule(name: str, *, delay: int = 0) -> Callable[[Rows], Recipe]:
    """Decorator: register a generator of tasks as the recipe ``name``.

    Registering a name again replaces it, so that a notebook cell can be run twice.
    """

    def register(tasks: Rows) -> Recipe:
        recipe = Recipe(name, tasks, delay)
        RECIPES[name] = recipe
        return recipe

    return register


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises InputError with the near names."""
    if name not in RECIPES:
        raise InputError(f"there is no schedule {name!r}: {near(name, RECIPES)}")
    return RECIPES[name]
