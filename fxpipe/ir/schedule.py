"""The Schedule: each device's compute tasks in order, and where the stages are.

Communication, frees and versions are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fxpipe import views
from fxpipe.errors import InputError
from fxpipe.formatting import plural, shown
from fxpipe.ir.task import WITHOUT_GRADIENTS, Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Edges = tuple[tuple[int, int], ...]
"""Pairs of stages; the first feeds the second."""

Delay = int | tuple[int, ...]
"""A schedule's delay: a number for all stages, or one for each stage."""


@dataclass(frozen=True)
class Schedule:
    """What every device computes in one step, in order.

    The rows are a window that each step repeats; it may hold tasks of earlier batches. The first
    steps leave out the tasks of batches that do not exist, and a flush after the last step runs the
    tasks that are left.

    Attributes:
        name: its name in messages and pictures.
        microbatches: the micro-batches of a step, m.
        placement: stage → device; its length is the number of stages.
        rows: device → its tasks in order, each with its stage.
        delay: batch t reads weight version max(t − delay, 0). A number, or one for each stage.
        copies: stage → the further devices that compute it, in order; empty if no stage has any.
            Each micro-batch is computed on the device whose row holds its tasks. The stage's own
            device holds the weights, and updates them once the gradients of all are summed.
        paired: the backwards that run together with the forward right before them; see Pair.
        slices: the parts of each micro-batch's sequence. A stage of the model is then one stage for
            each slice, all on one device: of ``stages / slices`` = S stages of the model, stage
            ``c * S + s`` is slice c of stage s. It comes after slice c of stage s − 1, and after
            slice c − 1 of stage s, whose keys and values it reads.
        edges: which stages of the model feed which, as pairs, each with the lower stage first; None
            for a chain, in which each feeds the next. Stages without a way from one to the other
            are side by side, and do not wait for each other.
        frozen: micro-batches and stages, as pairs, whose weight gradients are left out: their
            backward is an I without a W, which adds nothing to the stage's gradients.
        seconds: letter and stage → the seconds of such a task, with which ``draw`` shows it; those
            that a pipe has measured in ``pipe.schedule``, elsewhere none. They do not count when
            schedules are compared.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Task, ...], ...]
    delay: Delay = 0
    copies: tuple[tuple[int, ...], ...] = ()
    paired: frozenset[Task] = frozenset()
    slices: int = 1
    edges: Edges | None = None
    frozen: frozenset[tuple[int, int]] = frozenset()
    seconds: Mapping[tuple[str, int], float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check_listed("placement", self.placement, "a tuple with the device of each stage", 1)
        _check_listed("rows", self.rows, "for each device a tuple of its tasks", 2)
        _check_listed("copies", self.copies, "for each stage a tuple of its further devices", 2)
        object.__setattr__(self, "copies", ordered_copies(self.copies))
        object.__setattr__(self, "paired", frozenset(self.paired))
        frozen = tuple(self.frozen) if isinstance(self.frozen, set | frozenset) else self.frozen
        _check_listed("frozen", frozen, "pairs of a micro-batch and a stage", 2, 2)
        object.__setattr__(self, "frozen", frozenset((i, stage) for i, stage in frozen))
        # Bring edges and delay into one form, so that equal schedules compare equal.
        if self.edges is not None:
            _check_listed("edges", self.edges, "pairs of stages, such as ((0, 1),)", 2, 2)
            edges = tuple(sorted({(source, target) for source, target in self.edges}))
            object.__setattr__(self, "edges", None if edges == self._chain else edges)
        if isinstance(self.delay, tuple) and len(self.delay) == self.stages == 1:
            object.__setattr__(self, "delay", self.delay[0])

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def _chain(self) -> Edges:
        return tuple((s, s + 1) for s in range(self.stages // max(self.slices, 1) - 1))

    @cached_property
    def beside(self) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
        """Stage → the stages right before it, and → those right after it, in order: those that feed
        it or that it feeds, and the same stage of the model in the slice before or after."""
        row = max(self.stages // max(self.slices, 1), 1)
        edges = self._chain if self.edges is None else self.edges
        ends = [(s + a, s + b) for s in range(0, self.stages, row) for a, b in edges]
        before: dict[int, list[int]] = {stage: [] for stage in range(self.stages)}
        after: dict[int, list[int]] = {stage: [] for stage in before}
        for source, target in sorted({*ends, *((s, s + row) for s in range(self.stages - row))}):
            if source in after and target in before:  # the verifier reports the others
                before[target].append(source)
                after[source].append(target)
        return before, after

    @cached_property
    def behind(self) -> Mapping[int, frozenset[int]]:
        """Stage → all stages that come after it. Edges must run forward."""
        found: dict[int, frozenset[int]] = {}
        for stage, near in sorted(self.beside[1].items(), reverse=True):
            found[stage] = frozenset(near).union(*(found[target] for target in near))
        return found

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The letters of its tasks."""
        return frozenset(task.kind for row in self.rows for task in row)

    def units(self, device: int) -> Iterator[tuple[Task, ...]]:
        """A device's tasks in order, each alone, or two that are a pair."""
        unit: tuple[Task, ...] = ()
        for task in self.rows[device]:
            if unit and task not in self.paired:
                yield unit
                unit = ()
            unit = (*unit, task)
        if unit:
            yield unit

    def indices_of(self, kind: str) -> frozenset[tuple[int | None, int | None]]:
        """The stage and micro-batch of each task of a kind."""
        return frozenset(
            (t.stage, t.microbatch) for row in self.rows for t in row if t.kind == kind
        )

    @cached_property
    def trains(self) -> bool:
        """False for a schedule of inference."""
        return bool(self.kinds - WITHOUT_GRADIENTS)

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """Stage → its delay."""
        return self.delay if isinstance(self.delay, tuple) else (self.delay,) * self.stages

    @cached_property
    def depth(self) -> int:
        """How many batches back its tasks reach; 0 where every step ends with a flush."""
        return max((-task.batch for row in self.rows for task in row), default=0)

    @cached_property
    def overlaps(self) -> bool:
        """Whether batches overlap, so that a step ends without a flush."""
        return self.depth > 0 or any(self.delays)

    def held_by(self, device: int) -> tuple[int, ...]:
        """The stages that a device holds, its copies included, in order."""
        return tuple(s for s in range(self.stages) if device in self.devices_of(s))

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """A stage's own device, and those of its copies."""
        return (self.placement[stage], *(self.copies[stage] if self.copies else ()))

    def device_of(self, stage: int, microbatch: int) -> int:
        """The device that computes a micro-batch of a stage."""
        return self._elsewhere.get((stage, microbatch), self.placement[stage])

    @cached_property
    def _elsewhere(self) -> dict[tuple[int, int | None], int]:
        """Stage and micro-batch that a copy computes → the device of the copy."""
        return {
            (task.stage, task.microbatch): device
            for device, row in enumerate(self.rows if self.copies else ())
            for task in row
            if task.kind == "F" and task.stage is not None and 0 <= task.stage < self.stages
            if device in self.devices_of(task.stage)[1:]
        }

    @cached_property
    def working(self) -> tuple[tuple[int, ...], ...]:
        """Stage → the devices of its copies that compute any micro-batch, in order.

        Other copies have no effect.
        """
        busy = {(stage, device) for (stage, _), device in self._elsewhere.items()}
        return tuple(
            tuple(device for device in devices if (stage, device) in busy)
            for stage, devices in enumerate(self.copies)
        )

    def __str__(self) -> str:
        """Text that ``Schedule.parse`` reads back to an equal value."""
        from fxpipe.text.schedule import print_schedule

        return print_schedule(self)

    def __repr__(self) -> str:
        counts = f"{plural(self.devices, 'device')}, {plural(self.stages, 'stage')}"
        return f"<Schedule {self.name}: {counts}, {self.microbatches} micro-batches>"

    def _repr_mimebundle_(self, **kinds: object) -> dict[str, str]:
        return shown(self, sum(map(len, self.rows)))

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read a schedule's text. Raises ParseError with line and column."""
        from fxpipe.text.schedule import parse_schedule

        return parse_schedule(text)

    def verify(self) -> Schedule:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.schedule import verify_schedule

        return verify_schedule(self)

    versions = views.schedule_versions_of
    """The weight versions that each stage keeps, how stale they are, and the smallest delay:
    ``fxpipe.extensions.overlapping.delays.schedule_versions``."""

    kept = views.schedule_kept
    """The most micro-batches that stages and devices keep between forward and backward:
    ``fxpipe.extensions.simulator.kept.schedule_kept``."""

    simulate = views.schedule_simulate
    draw = views.schedule_draw
    grid = views.schedule_grid_of


def _check_listed(name: str, value: Any, what: str, depth: int, size: int = 0) -> None:
    """Raise InputError unless a value is a tuple, or, with a depth of 2, a tuple of tuples, perhaps
    all of one size."""
    inner = value if depth == 2 and isinstance(value, tuple | list) else ()
    listed = all(isinstance(item, tuple | list) for item in (value, *inner))
    if not listed or (size and any(len(item) != size for item in inner)):
        raise InputError(f"{name} of a schedule is {value!r:.60}; give {what}")


def ordered_copies(copies: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Sort each stage's copies; empty if there are none. So equal schedules compare equal."""
    return tuple(tuple(sorted(devices)) for devices in copies) if any(copies) else ()


def delay_text(delay: Delay) -> str:
    """``1``; ``2,1,0`` for three stages."""
    return ",".join(map(str, delay)) if isinstance(delay, tuple) else str(delay)
