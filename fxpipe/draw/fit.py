"""How wide a chart must be, and how small its labels, so that they fit into their boxes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fxpipe.draw.canvas import text_width

_LARGEST, _SMALLEST = 9.0, 5.0
_WIDEST, _NARROWEST = 1500.0, 360.0
_AIR = 4.0
_TIGHT = 1.0


@dataclass(frozen=True)
class Fit:
    """The scale of a chart and of its labels.

    Attributes:
        scale: points per unit of time.
        size: size of the labels' font.
        legible: whether rows are high enough for labels at all.
    """

    scale: float
    size: float
    legible: bool

    def label(self, text: str, time: float) -> str:
        """The label where it fits into a box of that time, else none."""
        fits = text_width(text, self.size) + _TIGHT <= time * self.scale * (1 + 1e-9)
        return text if self.legible and fits else ""


def fit(boxes: Collection[tuple[str, float]], end: float, row_height: float) -> Fit:
    """Choose the scale for boxes given as label and time.

    A chart grows until all labels fit well or it is as wide as a picture should be; then the
    labels shrink; at the smallest legible size those that do not fit are left out.
    """
    largest = min(_LARGEST, row_height * 0.6)
    needed = max(((text_width(text, largest) + _AIR) / time for text, time in boxes), default=1)
    scale = min(max(needed, _NARROWEST / end), _WIDEST / end)
    fitting = min(
        ((time * scale - _TIGHT) / text_width(text, 1) for text, time in boxes if text),
        default=largest,
    )
    size = max(_SMALLEST, min(fitting, largest))
    return Fit(scale, size, legible=size <= largest)
