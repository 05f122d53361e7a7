"""Draws a schedule as text, with a row for each device and time to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from fxpipe.errors import InputError
from fxpipe.extensions.draw.chart import TICKS, FaultMarks, nice_step
from fxpipe.extensions.draw.styles import stage_tag
from fxpipe.extensions.draw.timeline import Bar, Timeline, timeline_of
from fxpipe.extensions.simulator.costs import Costs
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

_SHORT = 0.25
"""Tasks that take less than this share of the median do not widen the grid."""

_NARROWEST = 20
_MOST = 100_000_000

_APART = 6
"""The least number of characters between two times on the ruler."""


def schedule_grid(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    steps: int | None = None,
    width: int | None = None,
) -> str:
    """Show when each task runs, to scale, with communication that takes no time.

    A task reaches from its name to its last dash; a dot is idle time, as long as the shortest
    task::

           0     2     4     6     8
        0: F0 F1 .  .  B0--- .  B1--- U
        1: .  F0 B0--- F1 B1--- .  .  U

    ``F1&B0--`` is a pair. A task at fault has a ``!``, one that never runs has a ``?``, and the
    faults are listed below. Where devices have several stages of the model, ``F0@2`` is on stage 2;
    in a schedule with slices, ``F0:1`` is of slice 1. Where several steps are shown, ``F0b1``
    belongs to the second batch. Offloads and prefetches that run beside a device's tasks have rows
    of their own below, ``0O`` and ``0P``.

    Args:
        schedule: the schedule to show.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's.
        steps: how many steps to show, as for ``draw_schedule``.
        width: the most characters in a line; a longer grid continues below. By default no limit.

    Raises:
        InputError: a letter or stage of ``costs`` is unknown, or a time negative or not finite;
            ``steps`` is below 1 or ``width`` below 20.
    """
    if width is not None and not (isinstance(width, int) and width >= _NARROWEST):
        raise InputError(f"width is {width!r}; a grid needs at least {_NARROWEST} characters")
    timeline, marks = timeline_of(schedule, costs, steps)
    grid = _Grid(schedule, timeline, marks)
    lines = list(grid.bands(width))
    lines += [f"! {fault}" for fault in marks.faults]
    return "\n".join(line.rstrip() for line in lines)


class _Grid:
    """A timeline in columns of characters."""

    def __init__(self, schedule: Schedule, timeline: Timeline, marks: FaultMarks) -> None:
        self._schedule = schedule
        self._tags_stages = schedule.stages > schedule.devices * schedule.slices
        self._steps = timeline.steps
        self._marks = marks
        self._never = set(timeline.unrun)
        self._end, self._beside = timeline.end, timeline.beside
        spans = [s for s in timeline.bars if s.end > s.start]
        times = [s.end - s.start for s in spans if s.task.microbatch is not None] or [1.0]
        least = _SHORT * median(times)
        usual = [
            (len(self._name(s)) + 1, s.end - s.start)
            for s in spans
            if s.task.microbatch is not None and s.end - s.start >= least
        ]
        self._scale = max((room / time for room, time in usual), default=1.0)
        self._unit = min((time for _, time in usual), default=1.0)
        if not self._end * self._scale * timeline.devices <= _MOST:  # "not <=" also refuses NaN
            raise InputError(
                f"the grid would have more than {_MOST} characters; show fewer micro-batches or "
                "steps, or give costs that are nearer to each other"
            )
        self._rows = [self._blank() for _ in range(timeline.devices)]
        self._joined = timeline.joined
        for span in spans:
            self._put(span)

    def bands(self, width: int | None) -> Iterator[str]:
        """The lines, each no longer than ``width``."""
        devices = range(len(self._rows) - len(self._beside))
        heads = [f"{row}: " for row in (*devices, *(f"{d}{letter}" for d, letter in self._beside))]
        indent = max(map(len, heads), default=0)
        whole = self._column(self._end)
        room = whole if width is None else width - indent
        ruler = "".join(self._ruler())
        start = stop = 0
        while stop < whole:
            if start:
                yield ""
            stop = self._cut(ruler, start, start + room)
            yield " " * indent + ruler[start:stop]
            for head, row in zip(heads, self._rows, strict=True):
                yield head.rjust(indent) + "".join(row[start:stop])
            start = stop

    def _cut(self, ruler: str, start: int, stop: int) -> int:
        """The last column up to ``stop`` where a line can end without cutting a name."""
        lines = [ruler, *self._rows]
        for column in range(stop, (start + stop) // 2, -1):
            if not any(_named(line, column - 1) and _named(line, column) for line in lines):
                return column
        return stop

    def _column(self, time: float) -> int:
        # Not ``round``: it rounds halves to even, and equal tasks would differ in width.
        return int(time * self._scale + 0.5 + 1e-9)

    def _blank(self) -> list[str]:
        """An idle row: a dot for each unit of time."""
        row = [" "] * self._column(self._end)
        for tick in range(int(self._end / self._unit + 1e-9)):
            row[self._column(tick * self._unit)] = "."
        return row

    def _put(self, span: Bar) -> None:
        start, stop = self._column(span.start), self._column(span.end)
        room = stop - start
        name = self._name(span)
        if len(name) >= room:  # No room for a blank behind it.
            name = span.task.kind + "?" * name.count("?") + "!" * name.count("!")
        self._rows[span.device][start:stop] = name[:room].ljust(room - 1, "-").ljust(room)
        if start and (span.device, span.position) in self._joined:
            self._rows[span.device][start - 1] = "&"

    def _name(self, span: Bar) -> str:
        task = span.task
        name = str(Task(task.kind, task.microbatch, None, 0 if self._steps else task.batch))
        name += f"b{task.batch}" if self._steps > 1 else ""
        if task.stage is not None:
            schedule, named = self._schedule, self._tags_stages
            name += stage_tag(schedule, schedule.slices, task.stage, named=named)
        name += "?" if span in self._never else ""
        return name + ("!" if (span.device, span.position) in self._marks.at else "")

    def _ruler(self) -> Iterator[str]:
        """The parts of the ruler: round times at their columns, with blanks between them."""
        step = nice_step(TICKS * _APART / self._scale)
        length = 0
        for tick in range(int(self._end / step + 1e-9) + 1):
            at = self._column(tick * step)
            text = f"{tick * step:g}"
            if not length or length < at <= self._column(self._end) - len(text):
                yield " " * (at - length) + text
                length = at + len(text)


def _named(row: Sequence[str], column: int) -> bool:
    """Whether a name has a character in this column."""
    return column < len(row) and row[column] not in " .-"
