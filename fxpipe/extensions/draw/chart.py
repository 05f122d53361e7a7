"""The frame of a picture of devices over time: its scale, rows, axis, legend and faults."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from fxpipe.errors import Fault, VerificationError
from fxpipe.extensions.draw.canvas import ArrowStyle, BoxStyle, Canvas, Point, text_width
from fxpipe.extensions.draw.picture import FAINT, FAULT, IDLE, INK, PAPER
from fxpipe.formatting import plural
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule

_LARGEST, _LEGIBLE, _SMALLEST = 9.0, 6.0, 5.0
_WIDEST, _NARROWEST = 1500.0, 360.0
_WIDER = 2600.0
"""The greatest width of a picture whose labels would not be legible at ``_WIDEST``."""

_PAGE, _TALL = 1100.0, 1500.0
"""The width of a chart's lines, and the greatest height of all of them, if it is wrapped."""

_BETWEEN_LINES = 40.0
_AIR = 4.0
_TIGHT = 1.0
_LINE = 1.25
"""The height of a line divided by its font size."""


@dataclass(frozen=True)
class ChartScale:
    """A chart's scale in points per unit of time, font size of labels, height of boxes, and the
    number of lines into which it is wrapped."""

    scale: float
    size: float
    height: float
    lines: int = 1

    def label(self, text: str, time: float) -> str:
        """The first lines of the label that fit into the box of a task that takes ``time``."""
        shown: list[str] = []
        for line in text.split("\n"):
            wide = text_width(line, self.size) + _TIGHT > time * self.scale * (1 + 1e-9)
            if wide or (len(shown) + 1) * self.size * _LINE > self.height:
                break
            shown.append(line)
        return "\n".join(shown)


def scale_for(
    boxes: Collection[tuple[str, float]], end: float, row_height: float, rows: int
) -> ChartScale:
    """Choose the scale for ``boxes``, each a label and a time.

    The chart grows until all labels fit or it is ``_WIDEST``; from there the font shrinks to
    ``_SMALLEST``. Before it is illegible, a chart of so many ``rows`` is wrapped into
    lines, like text, if all of them fit on a page. Any other chart then grows up to ``_WIDER`` if
    all lines of the labels fit there, or at least the first line of each. ``ChartScale.label``
    leaves out lines that do not fit.
    """
    room = max(int(row_height / (_LINE * _LEGIBLE)), 1)
    lines = max((min(text.count("\n") + 1, room) for text, _ in boxes), default=1)
    largest = max(min(_LARGEST, row_height / (_LINE * max(lines, 1.35))), _SMALLEST)
    scale = max(_scale(boxes, largest, _AIR), _NARROWEST / end)
    wrapped = 1
    if _scale(boxes, _LEGIBLE, _TIGHT) * end > _WIDEST:
        tall = rows * row_height * (1 + GAP) + _BETWEEN_LINES
        for size, air in ((largest, _AIR), (_LEGIBLE, _TIGHT)):
            needed = math.ceil(_scale(boxes, size, air) * end / _PAGE)
            if needed * tall <= _TALL:
                wrapped, scale = needed, needed * _PAGE / end
                break
    if wrapped == 1 and scale * end > _WIDEST:
        scale = _WIDEST / end
        first = {(text.split("\n")[0], time) for text, time in boxes}
        for legible in (_scale(boxes, _SMALLEST, _TIGHT), _scale(first, _SMALLEST, _TIGHT)):
            if legible <= _WIDER / end:
                scale = max(scale, legible)
                break
    fitting = min(
        ((time * scale - _TIGHT) / text_width(text, 1) for text, time in boxes if text and time),
        default=largest,
    )
    return ChartScale(scale, max(_SMALLEST, min(fitting, largest)), row_height, wrapped)


def _scale(boxes: Collection[tuple[str, float]], size: float, room: float) -> float:
    """The scale at which all labels fit in this font size, with ``room`` points to spare."""
    return max(
        ((text_width(text, size) + room) / time for text, time in boxes if text and time),
        default=1,
    )


_TITLE, _ROW, _SMALL = 12.0, 9.0, 8.0
_SAMPLE, _LONG_SAMPLE = 20.0, 30.0
_SLACK = 2.0
_LEGEND_WIDTH = 520.0
_LEGEND_PITCH = 14.0
TICKS = 12
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class LegendEntry:
    """One entry of the legend: its meaning, and a sample with a label, if any."""

    text: str
    sample: BoxStyle | ArrowStyle | None = None
    label: str = ""


class Chart:
    """A title and a labelled row for each device, drawn as idle before tasks are added."""

    def __init__(
        self,
        canvas: Canvas,
        title: str,
        labels: Sequence[str],
        end: float,
        scale: float,
        *,
        start: float,
        top: float,
        gap: float,
        height: float,
        marks: FaultMarks,
    ) -> None:
        """Draw the frame, for the times from ``start`` to ``end``, with red labels for rows at
        fault.

        ``scale`` is in points per unit of time, and ``gap`` is a fraction of the rows' ``height``.
        A chart without a title has no room for one.
        """
        self.canvas = canvas
        self.row_height = height
        self._pitch = self.row_height * (1 + gap)
        self._rows = len(labels)
        self.start, self.end = start, end
        self._scale = scale
        size = min(_ROW, self.row_height * 0.75)
        self._left = max((text_width(label, size) for label in labels), default=0.0) + 10
        self.top = top
        self._top = top + (24 if title else 0) + max(self.row_height * gap, 6.0)
        for row in range(len(labels)):
            wide = max((end - start) * scale, 1)
            canvas.band((self._left, self.y(row)), wide, self.row_height, IDLE)
        for row, label in enumerate(labels):
            colour, wide = FAULT if (row, None) in marks.at else INK, self._left - 8
            canvas.text((0, self.y(row)), wide, self.row_height, label, size=size, colour=colour)
        if title:
            wide = text_width(title, _TITLE, bold=True) + _SLACK
            self.canvas.text((0, top), wide, 22, title, size=_TITLE, bold=True)

    def x(self, time: float) -> float:
        return self._left + (time - self.start) * self._scale

    def y(self, row: int) -> float:
        """The upper edge of a row."""
        return self._top + row * self._pitch

    def ends(self, source: int, start: float, target: int, stop: float) -> tuple[Point, Point]:
        """The ends of an arrow between two rows, at the edges that face each other."""
        near, far = (self.row_height, 0.0) if target > source else (0.0, self.row_height)
        return (start, self.y(source) + near), (stop, self.y(target) + far)

    @property
    def bottom(self) -> float:
        return self.y(self._rows - 1) + self.row_height if self._rows else self._top

    def axis(self, caption: str = "") -> float:
        """Draw the time axis under the rows; returns the y below it."""
        y = self.bottom + 6
        long = self.end - self.start
        self.canvas.box((self._left, y), max(long * self._scale, 1), 0.6, BoxStyle(FAINT))
        step = nice_step(long)
        first, last = math.ceil(self.start / step - 1e-9), int(self.end / step + 1e-9)
        for tick in range(first, last + 1):
            x, label = self.x(tick * step), f"{tick * step:g}"
            self.canvas.box((x - 0.3, y), 0.6, 3.5, BoxStyle(FAINT))
            wide = text_width(label, _SMALL) + _SLACK
            self.canvas.text((x - wide / 2, y + 4), wide, 11, label, size=_SMALL, align="centre")
        if not caption:
            return y + 18
        wide = text_width(caption, _SMALL) + _SLACK
        self.canvas.text((self._left, y + 16), wide, 12, caption, size=_SMALL)
        return y + 34


def draw_legend(
    canvas: Canvas, left: float, right: float, y: float, entries: Sequence[LegendEntry]
) -> float:
    """Draw the entries in lines from ``left`` to ``right``, or as wide as a page; returns the y
    below them."""
    x, right = left, max(right, _LEGEND_WIDTH)
    for entry in entries:
        sample = _LONG_SAMPLE if isinstance(entry.sample, ArrowStyle) else _SAMPLE
        indent = sample + 4 if entry.sample else 0
        wide = text_width(entry.text, _SMALL) + _SLACK
        if x > left and x + indent + wide > right:
            x, y = left, y + _LEGEND_PITCH
        _draw_sample(canvas, x, y, entry)
        canvas.text((x + indent, y), wide, 12, entry.text, size=_SMALL)
        x += indent + wide + 10
    return y + _LEGEND_PITCH + 6


def _draw_sample(canvas: Canvas, x: float, y: float, entry: LegendEntry) -> None:
    match entry.sample:
        case BoxStyle() as look:
            canvas.box((x, y + 1), _SAMPLE, 10, look, label=entry.label, size=6.5)
        case ArrowStyle() as stroke:
            path = [(x + part * _LONG_SAMPLE, y + 6) for part in (0, 0.3, 0.6, 1)]
            ends = [canvas.box(at, 0, 0, BoxStyle()) for at in (path[0], path[-1])]
            canvas.arrow(ends[0], ends[1], path, stroke)


def row_height(devices: int, lines: int = 1) -> float:
    """The height of a row whose labels have ``lines`` lines; many devices get lower rows, so that
    the picture fits on a screen."""
    return min(max(24.0, _LARGEST * _LINE * lines + 2), max(8.0, 480.0 / max(devices, 1)))


def nice_step(end: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, for at most ``TICKS`` ticks."""
    if end <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end / TICKS))
    return next((step * power for step in _STEPS if end / (step * power) <= TICKS), 10 * power)


FAULTY = BoxStyle(PAPER, FAULT, 2.0)
"""The look of a task or instruction at fault; one that runs keeps its own fill."""

WAITING = BoxStyle(PAPER, FAULT, 0.8, "dashed")
"""The look of a task at which a device waits for ever."""

NEVER = BoxStyle(PAPER, FAINT, 0.6, "dotted")
"""The look of a task that never runs because its device waits for ever before it."""

GAP = 0.55
"""The space between rows, as a fraction of their height, if arrows go between them."""

_LISTED = 16
_SIZE, _PITCH = 8.0, 12.0


@dataclass(frozen=True)
class FaultMarks:
    """The faults of a schedule, program or plan, numbered from 1."""

    faults: tuple[Fault, ...] = ()

    @cached_property
    def at(self) -> Set[tuple[int | None, int | None]]:
        """Device and position of each; of some, without a position, or without either."""
        return {(fault.device, fault.position) for fault in self.faults}

    @property
    def count(self) -> str:
        return plural(len(self.faults), "fault")

    @property
    def listed(self) -> list[str]:
        """The faults as numbered lines, at most ``_LISTED``, and then how many more there are."""
        shown = [f"{number}. {fault}" for number, fault in enumerate(self.faults, start=1)]
        if len(shown) > _LISTED:
            shown[_LISTED:] = [f"… and {len(shown) - _LISTED} more"]
        return shown

    def list(self, canvas: Canvas, x: float, y: float) -> None:
        """Draw the list of the faults, from ``y`` down."""
        for line, text in enumerate(self.listed):
            wide = text_width(text, _SIZE) + 2
            corner = (x, y + line * _PITCH)
            canvas.text(corner, wide, _PITCH, text, size=_SIZE, colour=FAULT)


def marks_of(verified: Plan | Schedule | Program) -> FaultMarks:
    """The faults that the verifier finds."""
    try:
        verified.verify()
    except VerificationError as error:
        return FaultMarks(error.faults)
    return FaultMarks()
