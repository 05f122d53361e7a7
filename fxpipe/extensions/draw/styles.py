"""How tasks and instructions look in a picture.

A task's colour shows its kind, the tint its stage, the border its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.extensions.draw.canvas import ArrowStyle, BoxStyle
from fxpipe.extensions.draw.chart import LegendEntry
from fxpipe.extensions.draw.picture import (
    FAINT,
    GRADIENT,
    IDLE,
    INK,
    OTHER,
    PAPER,
    SKIP,
    SUM,
    TASKS,
    tint,
)
from fxpipe.extensions.simulator.simulation import Simulation, task_of, version_of
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task

BORDERS = ((PAPER, 0.6, ""), (INK, 0.8, "dashed"), (INK, 1.0, ""))
"""Colour, width and style of the outline; batches use them in rotation."""


@dataclass(frozen=True)
class TaskStyles:
    """The looks and labels of the tasks of one timeline.

    Attributes:
        drawn: what has these tasks.
        steps: see ``Timeline.steps``.
        versions: task → the weight version that it reads, or that an update writes; empty if
            versions are not shown.
        slices: the parts of each micro-batch's sequence, which have stages of their own.
    """

    drawn: Schedule | Program
    steps: int = 0
    versions: Mapping[Task, int | None] = field(default_factory=dict)
    slices: int = 1

    @cached_property
    def tags_stages(self) -> bool:
        """Whether labels name the stage, for devices that hold several stages of the model."""
        several = self.drawn.stages > self.drawn.devices * self.slices
        return several or any(self.drawn.copies)

    @cached_property
    def _shades(self) -> Mapping[int | None, int]:
        """Stage → its number among the stages of its device."""
        homes = self.drawn.placement
        return {stage: homes[:stage].count(home) for stage, home in enumerate(homes)}

    def look(self, task: Task) -> BoxStyle:
        shade, copied = self._shades.get(task.stage, 0), any(self.drawn.copies)
        count = max(self._shades.values(), default=0) + 1 + copied
        stage, i = task.stage, task.microbatch
        if copied and stage is not None and stage in self._shades and i is not None:
            if self.drawn.device_of(stage, i) != self.drawn.placement[stage]:
                shade = count - 1
        border, width, style = BORDERS[abs(task.batch) % len(BORDERS)]
        return BoxStyle(tint(TASKS.get(task.kind, OTHER), shade, count), border, width, style)

    def label(self, task: Task) -> str:
        """``F3``, then stage, batch and version if the picture needs them.

        Each is on its own line, which keeps boxes narrow and labels large. In a picture of one
        window the batch is marked as in the text form, ``B3'``.
        """
        name = str(Task(task.kind, task.microbatch, None, 0 if self.steps else task.batch))
        tags = []
        if task.stage is not None:
            tags.append(stage_tag(self.drawn, self.slices, task.stage, named=self.tags_stages))
        if self.steps > 1:
            tags.append(f"b{task.batch}")
        version = self.versions.get(task)
        if version is not None:
            tags.append(f"{'→' if task.kind == 'U' else ''}v{version}")
        return "\n".join(filter(None, [name, *tags]))

    def tell(self, task: Task, start: float, end: float) -> str:
        """The tooltip of a task."""
        parts = [KINDS[task.kind].name if task.kind in KINDS else task.kind]
        if task.microbatch is not None:
            parts.append(f"micro-batch {task.microbatch}")
        if self.slices > 1 and task.stage is not None:
            stage, part = of_model(self.drawn, self.slices, task.stage)
            parts.append(f"stage {stage}, slice {part}")
        else:
            parts.append(f"stage {task.stage}")
        if self.steps > 1 or task.batch:
            parts.append(f"batch {task.batch}")
        version = self.versions.get(task)
        if version is not None:
            parts.append(f"{'writes' if task.kind == 'U' else 'reads'} version {version}")
        return f"{', '.join(parts)}: {start:g} to {end:g}"

    def legend(self, tasks: Iterable[Task]) -> list[LegendEntry]:
        """The legend entries for the looks of these tasks."""
        tasks = list(tasks)
        entries = kind_entries({task.kind for task in tasks})
        entries.append(LegendEntry("idle", BoxStyle(IDLE, FAINT)))
        if self.tags_stages:
            which = "copies of stages" if any(self.drawn.copies) else "later stages of a device"
            entries.append(LegendEntry(f"lighter: {which}; @: the stage"))
        if self.slices > 1:
            entries.append(LegendEntry("lighter: later slices; behind a colon: the slice"))
        entries += self.batch_entries(tasks)
        if self.versions:
            entries.append(LegendEntry("v: the version of the weights"))
        return entries

    def batch_entries(self, tasks: Iterable[Task]) -> list[LegendEntry]:
        """The legend entries for the outlines of the batches of these tasks, if they differ."""
        batches = sorted({task.batch for task in tasks}, reverse=not self.steps)
        return [self._batch(batch) for batch in batches if batch or self.steps > 1]

    def _batch(self, batch: int) -> LegendEntry:
        border, width, style = BORDERS[abs(batch) % len(BORDERS)]
        look = BoxStyle(PAPER, FAINT if border == PAPER else border, width, style)
        if self.steps:
            return LegendEntry(f"batch {batch}", look, f"b{batch}")
        before = "the batch before" if batch == -1 else f"the batch {-batch} before"
        return LegendEntry(before, look, str(Task("B", 3, None, batch)))


def of_model(drawn: Schedule | Program, slices: int, stage: int) -> tuple[int, int]:
    """The stage of the model that a stage of a schedule with slices is, and its slice."""
    part, stage = divmod(stage, max(drawn.stages // max(slices, 1), 1))
    return stage, part


def stage_tag(drawn: Schedule | Program, slices: int, stage: int, *, named: bool) -> str:
    """What the label of a task says of its stage: ``@3`` if it is to be named, and in a schedule
    with slices its slice, ``:1``."""
    if slices > 1:
        stage, part = of_model(drawn, slices, stage)
        return (f"@{stage}" if named else "") + f":{part}"
    return f"@{stage}" if named else ""


def kind_entries(letters: Collection[str]) -> list[LegendEntry]:
    """The legend entries for kinds of tasks."""
    return [
        LegendEntry(kind.name, BoxStyle(TASKS.get(letter, OTHER), FAINT), letter)
        for letter, kind in KINDS.items()
        if letter in letters
    ]


def simulation_boxes(simulation: Simulation) -> TaskStyles:
    """The styles of a simulation's tasks, with weight versions if a task reads an older one."""
    tasks = [span.instruction for span in simulation.spans]
    versions = {task_of(x): version_of(x) for x in tasks}
    differ = any(task.kind != "U" and v != task.batch for task, v in versions.items())
    shown = versions if differ else {}
    return TaskStyles(simulation.program, simulation.steps, shown, simulation.slices)


_ACT, _SKIP = ArrowStyle(INK), ArrowStyle(SKIP, "dashed")
_GRADIENT, _SUM = ArrowStyle(GRADIENT), ArrowStyle(SUM, "dashed")
_ARROWS = {"grad": _GRADIENT, "sums": _GRADIENT, "sum": _SUM, "skip": _SKIP}


def arrow(kind: str) -> ArrowStyle:
    """The look of the arrow for a transfer: the kind of its buffer, or ``sum`` of gradients between
    replicas."""
    return _ARROWS.get(kind, _ACT)


def arrow_entries(kinds: Collection[str]) -> list[LegendEntry]:
    """The legend entries for arrows of these kinds."""
    meanings = {
        _ACT: "value to the next stage",
        _SKIP: "value that skips stages",
        _GRADIENT: "gradient",
        _SUM: "gradients are summed over the replicas",
    }
    strokes = set(map(arrow, kinds))
    return [LegendEntry(text, stroke) for stroke, text in meanings.items() if stroke in strokes]
