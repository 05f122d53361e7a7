"""Draws programs: a column for each device or stream, with its instructions in order, downwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from fxpipe.extensions.draw.canvas import ArrowStyle, BoxStyle, Canvas, text_width
from fxpipe.extensions.draw.chart import (
    FAULTY,
    NEVER,
    WAITING,
    FaultMarks,
    LegendEntry,
    draw_legend,
    marks_of,
)
from fxpipe.extensions.draw.picture import FAINT, FAULT, IDLE, INK, PAPER, Picture
from fxpipe.extensions.draw.rows import Column, Rows, rows_below
from fxpipe.extensions.draw.schedule import row_label
from fxpipe.extensions.draw.styles import TaskStyles, arrow, arrow_entries, kind_entries
from fxpipe.extensions.simulator.simulation import task_of
from fxpipe.formatting import plural
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, batch_mark
from fxpipe.ir.walk import Place
from fxpipe.text.program import print_instruction

ROWS, DEVICES = 120, 6
"""The most rows, and the most devices, of a picture."""

_ABOVE = 40
"""How many rows are drawn above the first fault, if those from the top do not reach it."""

_LONGEST, _NAME = 40, 20
"""The most characters of an instruction, and of a value's name at an arrow."""

_TITLE, _DEVICE, _SIZE, _SMALL = 12.0, 9.0, 8.0, 6.5
_PITCH, _HEIGHT, _AIR, _GAP = 14.0, 11.0, 8.0, 18.0
_EVENT = ArrowStyle(FAINT, "dotted")
_OTHER = BoxStyle(IDLE, INK)


def draw_program(program: Program) -> Picture:
    """Draw the instructions of a program, valid or not: for each device, or for each of its
    streams, a column with what it runs, in order, each below all that it waits for.

    An arrow with the value's name goes from each send to its receive, dashed if the value skips
    stages. A dotted arrow goes to what waits for an event from what records it on another stream.
    Instructions at fault have red borders, and the faults are listed below. The rows show the
    order, not times: ``program.simulate().draw()`` shows the times of tasks.

    Of a large program a part is drawn, and the picture says which: at most 120 rows of 6 devices,
    the first ones, or those around the first fault.
    """
    return _Drawing(rows_below(program), marks_of(program)).picture()


class _Drawing:
    """The picture of a part of a program."""

    def __init__(self, rows: Rows, marks: FaultMarks) -> None:
        self._rows, self._marks, self._program = rows, marks, rows.program
        self._styles, self._canvas = TaskStyles(rows.program), Canvas("program")
        self._count = max(rows.at.values(), default=-1) + 1
        wrong = {place for place in rows.at if place in marks.at} | rows.stuck
        first = min(wrong, key=rows.at.__getitem__, default=Place(0, 0))
        self._shown = _part(rows.at.get(first, 0), _ABOVE, self._count, ROWS)
        self._devices = _part(first.device, DEVICES // 2, rows.program.devices, DEVICES)
        self._columns = rows.columns(self._devices)
        self._top = 60.0 if self._program.launches else 46.0

    @cached_property
    def _places(self) -> list[Place]:
        """The places that are drawn, device by device."""
        at, shown = self._rows.at, self._shown
        return [p for p in sorted(at) if p.device in self._devices and at[p] in shown]

    @cached_property
    def _firsts(self) -> set[Column]:
        """The first column of each device, above which the device's name stands."""
        return set({column[0]: column for column in reversed(self._columns)}.values())

    def picture(self) -> Picture:
        drawn = {*self._places}
        transfers = [each for each in self._rows.transfers if drawn.issuperset(each[:2])]
        events = [each for each in self._rows.events if drawn.issuperset(each[:2])]
        lefts, widths = self._across(transfers)
        self._heads(lefts, widths)
        ends = {place: self._box(place, lefts, widths) for place in self._places}
        for before, after, event in events:
            self._arrow(ends[before], ends[after], _EVENT, str(event))
        for before, after, buffer in transfers:
            tail, head = ends[before], ends[after]
            self._arrow(tail, head, arrow(buffer.kind), str(buffer), _name(buffer))
        below = self._y(self._shown.stop) + 8
        entries = self._legend({buffer.kind for *_, buffer in transfers}, bool(events))
        right = lefts[self._columns[-1]] + widths[self._columns[-1]] if self._columns else 0.0
        below = draw_legend(self._canvas, 0.0, right, below, entries)
        self._marks.list(self._canvas, 0.0, below)
        return self._canvas.picture

    def _across(
        self, transfers: Iterable[tuple[Place, Place, Buffer]]
    ) -> tuple[dict[Column, float], dict[Column, float]]:
        """Column → its left edge, and its width. Between columns there is room for the names of
        what leaves them in that direction."""
        widths = {column: text_width(column[1], _SIZE) for column in self._columns}
        for column in self._firsts:
            widths[column] = text_width(row_label(self._program, column[0]), _DEVICE)
        for place in self._places:
            text = self._text(place)
            column = self._rows.column(place)
            widths[column] = max(widths[column], text_width(text, _SIZE) + _AIR)
        names: dict[tuple[Column, bool], float] = {}
        for tail, head, buffer in transfers:
            side = self._rows.column(tail), head > tail
            names[side] = max(names.get(side, 0.0), text_width(_name(buffer), _SMALL) + _AIR)
        lefts: dict[Column, float] = {}
        right, room = 0.0, 0.0
        for column in self._columns:
            lefts[column] = right + room + names.get((column, False), 0.0)
            right = lefts[column] + widths[column]
            room = _GAP + names.get((column, True), 0.0)
        return lefts, widths

    def _heads(self, lefts: dict[Column, float], widths: dict[Column, float]) -> None:
        """Draw the title, the part that is drawn, and the names of devices and streams."""
        program, canvas = self._program, self._canvas
        title = [f"program {program.name}", f"p = {program.devices}", f"m = {program.microbatches}"]
        title.append(plural(len(self._rows.at), "instruction"))
        if self._rows.never:
            title.append(f"STUCK: {len(self._rows.never)} never run")
        if self._marks.faults:
            title.append(self._marks.count)
        self._line(0, 0, " · ".join(title), _TITLE, bold=True)
        if part := self._left_out():
            self._line(0, 20, part, _SIZE)
        for column in self._columns:
            device, stream = column
            if column in self._firsts:
                colour = FAULT if (device, None) in self._marks.at else INK
                self._line(lefts[column], 32, row_label(program, device), _DEVICE, colour=colour)
            if stream:
                self._line(lefts[column], 45, stream, _SIZE, colour=FAINT)
            middle = lefts[column] + widths[column] / 2
            high = (len(self._shown) or 1) * _PITCH
            canvas.box((middle, self._top), 0.4, high, BoxStyle(FAINT))

    def _left_out(self) -> str:
        """What is not drawn, if anything."""
        rows, devices, parts = self._shown, self._devices, []
        if len(rows) < self._count:
            parts.append(f"rows {rows[0]} to {rows[-1]} of {self._count}")
        if len(devices) < self._program.devices:
            parts.append(f"devices {devices[0]} to {devices[-1]} of {self._program.devices}")
        if not parts:
            return ""
        return f"only {' and '.join(parts)}, and arrows between these: print(program) has the rest"

    def _line(
        self, x: float, y: float, text: str, size: float, *, bold: bool = False, colour: str = INK
    ) -> None:
        wide = text_width(text, size, bold=bold) + 2
        self._canvas.text((x, y), wide, size * 1.25, text, size=size, bold=bold, colour=colour)

    def _y(self, row: int) -> float:
        """The upper edge of the boxes of a row."""
        return self._top + (row - self._shown.start) * _PITCH

    def _text(self, place: Place) -> str:
        return _short(print_instruction(self._rows.instruction(place)), _LONGEST)

    def _box(self, place: Place, lefts: dict[Column, float], widths: dict[Column, float]) -> _Box:
        """Draw an instruction."""
        x, column = self._rows.instruction(place), self._rows.column(place)
        look = self._look(x)
        if place in self._rows.never:
            look = WAITING if place in self._rows.stuck else NEVER
        if place in self._marks.at:
            look = replace(FAULTY, fill=look.fill or PAPER)
        corner = lefts[column], self._y(self._rows.at[place])
        node = self._canvas.box(
            corner,
            widths[column],
            _HEIGHT,
            look,
            label=self._text(place),
            size=_SIZE,
            colour=FAINT if isinstance(x, ins.Free) and place not in self._marks.at else INK,
            tooltip=self._tell(place),
            name=f"instruction{place.device}_{place.position}",
        )
        return _Box(node, *corner, widths[column])

    def _look(self, x: ins.Instruction) -> BoxStyle:
        if x.letter is not None:
            return self._styles.look(task_of(x))
        if isinstance(x, ins.Free):
            return BoxStyle(PAPER)
        if isinstance(x, ins.Move):
            stroke = arrow(x.buffer.kind)
            return BoxStyle(
                PAPER, stroke.colour, stroke.penwidth, stroke.style.replace("solid", "")
            )
        return _OTHER

    def _tell(self, place: Place) -> str:
        """The tooltip of an instruction: its place, its text, and its events."""
        parts = [f"position {place.position}: {print_instruction(self._rows.instruction(place))}"]
        if self._program.launches:
            launch = self._program.launches[place.device][place.position]
            parts += [f"waits for {event}" for event in launch.waits]
            parts += [f"records {launch.record}"] if launch.record else []
        return ", ".join(parts)

    def _arrow(self, tail: _Box, head: _Box, stroke: ArrowStyle, tell: str, name: str = "") -> None:
        """Draw an arrow between the sides of two boxes that face each other, with a name at its
        tail."""
        right = head.left > tail.left
        start = tail.left + (tail.width if right else 0), tail.top + _HEIGHT / 2
        stop = head.left + (0 if right else head.width), head.top + _HEIGHT / 2
        bend = (stop[0] - start[0]) / 2
        path = [start, (start[0] + bend, start[1]), (stop[0] - bend, stop[1]), stop]
        self._canvas.arrow(tail.node, head.node, path, stroke, tooltip=tell)
        if name:
            wide = text_width(name, _SMALL) + 2
            x = start[0] + 2 if right else start[0] - wide - 2
            self._canvas.text(
                (x, tail.top - 3),
                wide,
                _SMALL + 1,
                name,
                size=_SMALL,
                align="left" if right else "right",
                colour=stroke.colour,
            )

    def _legend(self, kinds: set[str], events: bool) -> list[LegendEntry]:
        shown = [self._rows.instruction(place) for place in self._places]
        tasks = [task_of(x) for x in shown if x.letter is not None]
        entries = kind_entries({task.kind for task in tasks})
        entries += self._styles.batch_entries(tasks)
        entries += arrow_entries(kinds)
        if events:
            entries.append(LegendEntry("to what waits for an event", _EVENT))
        received = {buffer for *_, buffer in self._rows.transfers}
        arrivals = [x.buffer for x in shown if isinstance(x, ins.Receive)]
        if any(buffer.batch < 0 and buffer not in received for buffer in arrivals):
            entries.append(LegendEntry("recv without an arrow: sent in an earlier step"))
        if self._marks.faults:
            entries.append(LegendEntry("at fault", FAULTY))
        if self._rows.never:
            entries += [LegendEntry("waits for ever", WAITING), LegendEntry("never runs", NEVER)]
        return entries


class _Box(NamedTuple):
    """The box of an instruction: its node, left and upper edge, and width."""

    node: str
    left: float
    top: float
    width: float


def _part(first: int, before: int, count: int, most: int) -> range:
    """At most ``most`` of ``count``: from the start, or around ``first`` if it lies behind these,
    with ``before`` of them before it."""
    start = max(0, min(first - before, count - most)) if first >= most else 0
    return range(start, min(count, start + most))


def _name(buffer: Buffer) -> str:
    """``relu_1[0]``."""
    value = buffer.value or f"{buffer.kind} of stage {buffer.source}"
    return f"{_short(value, _NAME)}[{buffer.microbatch}{batch_mark(buffer.batch)}]"


def _short(text: str, most: int) -> str:
    """The text, with its middle left out if it is too long."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]}…{text[-half:]}"
