"""The frame of a picture with devices as rows and time to the right."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxpipe.draw.canvas import Canvas, Look, Stroke, text_width
from fxpipe.draw.colours import FAULT, IDLE, INK

_TITLE, _ROW, _SMALL = 12.0, 9.0, 8.0
_SAMPLE, _LONG_SAMPLE = 20.0, 30.0
_SLACK = 2.0
_LEGEND_WIDTH = 520.0
_LEGEND_PITCH = 14.0
TICKS = 12
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Entry:
    """One entry of the legend: a sample, if any, and what it means."""

    text: str
    sample: Look | Stroke | None = None
    label: str = ""


class Chart:
    """A title and a labelled row for each device, idle until something is put there.

    Attributes:
        canvas: where to draw more.
        row_height: height of each row.
        top: where it begins.
    """

    def __init__(
        self,
        canvas: Canvas,
        title: str,
        labels: Sequence[str],
        end: float,
        scale: float,
        *,
        top: float = 0.0,
        gap: float = 0.2,
        wrong: Collection[int] = (),
    ) -> None:
        """Draw the frame.

        Args:
            canvas: where to draw.
            title: the line above.
            labels: the rows' labels, device by device.
            end: the time at the right end.
            scale: points per unit of time.
            top: where to begin.
            gap: room between rows, over their height.
            wrong: devices whose label is in red.
        """
        self.canvas = canvas
        self.row_height = row_height(len(labels))
        self._pitch = self.row_height * (1 + gap)
        self._rows = len(labels)
        self._end = end
        self._scale = scale
        size = min(_ROW, self.row_height * 0.75)
        self._left = max((text_width(label, size) for label in labels), default=0.0) + 10
        self.top = top
        self._top = top + 24 + max(self.row_height * gap, 6.0)
        for device in range(len(labels)):
            y = self.y(device)
            self.canvas.band((self._left, y), max(end * scale, 1), self.row_height, IDLE)
        for device, label in enumerate(labels):
            y = self.y(device)
            colour = FAULT if device in wrong else INK
            self.canvas.text(
                (0, y), self._left - 8, self.row_height, label, size=size, colour=colour
            )
        wide = text_width(title, _TITLE, bold=True) + _SLACK
        self.canvas.text((0, top), wide, 22, title, size=_TITLE, bold=True)

    def x(self, time: float) -> float:
        """Where a time is."""
        return self._left + time * self._scale

    def y(self, device: int) -> float:
        """The upper edge of a device's row."""
        return self._top + device * self._pitch

    @property
    def bottom(self) -> float:
        """The lower edge of the last row."""
        return self.y(self._rows - 1) + self.row_height if self._rows else self._top

    def axis(self, caption: str) -> float:
        """Draw the time axis under the rows; returns where there is room below it."""
        y = self.bottom + 6
        self.canvas.rule((self._left, y), max(self._end * self._scale, 1), 0.6)
        step = nice_step(self._end)
        for tick in range(int(self._end / step + 1e-9) + 1):
            x, label = self.x(tick * step), f"{tick * step:g}"
            self.canvas.rule((x - 0.3, y), 0.6, 3.5)
            wide = text_width(label, _SMALL) + _SLACK
            self.canvas.text((x - wide / 2, y + 4), wide, 11, label, size=_SMALL, align="centre")
        wide = text_width(caption, _SMALL) + _SLACK
        self.canvas.text((self._left, y + 16), wide, 12, caption, size=_SMALL)
        return y + 34

    def legend(self, y: float, entries: Sequence[Entry]) -> float:
        """Draw the legend's entries in lines, from y on, no wider than the rows or a page.

        Returns where there is room below it.
        """
        x, right = self._left, max(self.x(self._end), _LEGEND_WIDTH)
        for entry in entries:
            sample = _LONG_SAMPLE if isinstance(entry.sample, Stroke) else _SAMPLE
            indent = sample + 4 if entry.sample else 0
            wide = text_width(entry.text, _SMALL) + _SLACK
            if x > self._left and x + indent + wide > right:
                x, y = self._left, y + _LEGEND_PITCH
            self._sample(x, y, entry)
            self.canvas.text((x + indent, y), wide, 12, entry.text, size=_SMALL)
            x += indent + wide + 10
        return y + _LEGEND_PITCH + 6

    def _sample(self, x: float, y: float, entry: Entry) -> None:
        match entry.sample:
            case Look() as look:
                self.canvas.box((x, y + 1), _SAMPLE, 10, look, label=entry.label, size=6.5)
            case Stroke() as stroke:
                path = [(x + part * _LONG_SAMPLE, y + 6) for part in (0, 0.3, 0.6, 1)]
                ends = [self.canvas.box(at, 0, 0, Look()) for at in (path[0], path[-1])]
                self.canvas.arrow(ends[0], ends[1], path, stroke)
            case None:
                pass


def row_height(devices: int) -> float:
    """Rows are lower where there are many, so that a picture stays on a screen."""
    return min(24.0, max(8.0, 480.0 / max(devices, 1)))


def nice_step(end: float) -> float:
    """The distance of ticks: 1, 2 or 5 times a power of ten, for a dozen ticks or fewer."""
    if end <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end / TICKS))
    return next((step * power for step in _STEPS if end / (step * power) <= TICKS), 10 * power)
