"""How wide a chart must be, and how small its labels, so that they fit into their boxes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fxpipe.draw.canvas import text_width

_LARGEST, _SMALLEST = 9.0, 5.0
_WIDEST, _NARROWEST = 1500.0, 360.0
_WIDER = 2600.0
"""As wide as a picture may be where that is what it takes for its labels to be legible."""

_AIR = 4.0
_TIGHT = 1.0
_LINE = 1.25
"""Height of a line over the size of its font."""


@dataclass(frozen=True)
class Fit:
    """The scale of a chart and of its labels.

    Attributes:
        scale: points per unit of time.
        size: size of the labels' font.
        height: of the boxes.
    """

    scale: float
    size: float
    height: float

    def label(self, text: str, time: float) -> str:
        """As many of the label's lines, from the first, as fit into a box of that time."""
        shown: list[str] = []
        for line in text.split("\n"):
            wide = text_width(line, self.size) + _TIGHT > time * self.scale * (1 + 1e-9)
            if wide or (len(shown) + 1) * self.size * _LINE > self.height:
                break
            shown.append(line)
        return "\n".join(shown)


def fit(boxes: Collection[tuple[str, float]], end: float, row_height: float) -> Fit:
    """Choose the scale for boxes given as label and time.

    A chart grows until all labels fit well or it is as wide as a picture should be; then the
    labels shrink; at the smallest legible size it grows a little more if that makes all lines fit,
    or at least the first of each, and lines that do not fit are left out.
    """
    lines = max((text.count("\n") + 1 for text, _ in boxes), default=1)
    largest = max(min(_LARGEST, row_height / (_LINE * max(lines, 1.35))), _SMALLEST)
    scale = max(_scale(boxes, largest, _AIR), _NARROWEST / end)
    if scale * end > _WIDEST:
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
    return Fit(scale, max(_SMALLEST, min(fitting, largest)), row_height)


def _scale(boxes: Collection[tuple[str, float]], size: float, room: float) -> float:
    """At which all labels of that size fit."""
    return max(
        ((text_width(text, size) + room) / time for text, time in boxes if text and time),
        default=1,
    )
