"""A canvas on a graphviz picture: boxes, texts, lines and arrows at given positions.

Lengths are in points, x to the right and y down. Every node and edge has its position in the DOT
source (``PLACED``), so the ``dot`` program and other Graphviz viewers show the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fxpipe.extensions.draw.picture import BOLD_FONT, INK, PAPER, PLACED, Picture, blank, quoted

Point = tuple[float, float]
Align = Literal["left", "centre", "right"]

POINTS_PER_INCH = 72
_PARTED = 3.0
_HEAD = 4.5
_HEAD_OF_SIZE_1 = 10
_JUSTIFY: dict[Align, str] = {"left": r"\l", "centre": "", "right": r"\r"}

_NARROW = frozenset(" .,:;'|()[]ijlIft·")
_WIDE = frozenset("@%mMwW=+−×…→")
_BOLD = 1.15


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The approximate width of a text's widest line, in points, in the wide font DejaVu Sans."""
    return max(map(_ems, text.split("\n"))) * size * (_BOLD if bold else 1)


@lru_cache(maxsize=4096)
def _ems(text: str) -> float:
    return sum(
        0.4 if c in _NARROW else 1.0 if c in _WIDE else 0.75 if c.isupper() else 0.65 for c in text
    )


@dataclass(frozen=True)
class BoxStyle:
    """The fill and outline of a box; without a colour, either is not drawn.

    ``style`` is ``dashed``, ``dotted``, ``rounded`` or empty.
    """

    fill: str = ""
    border: str = ""
    penwidth: float = 0.6
    style: str = ""


@dataclass(frozen=True)
class ArrowStyle:
    colour: str = INK
    style: str = "solid"
    penwidth: float = 0.8


class Canvas:
    """Draws at given positions; ``picture`` is the result.

    From bottom to top: bands, arrows, then boxes and texts in the order in which they are drawn.
    """

    def __init__(self, name: str) -> None:
        self.picture: Picture = blank(name, layout=PLACED, outputorder="edgesfirst")
        self.picture.node_attr.update(fixedsize="true", penwidth="0", label="")
        self._unnamed = 0

    def box(
        self,
        corner: Point,
        width: float,
        height: float,
        look: BoxStyle,
        *,
        label: str = "",
        size: float = 9,
        colour: str = INK,
        tooltip: str = "",
        name: str = "",
    ) -> str:
        """Draw a rectangle whose upper left corner is ``corner``; returns its node's name.

        An outline in the paper's colour only separates neighbours. Narrow boxes have none, as it
        would hide them.
        """
        node = name or self._fresh()
        attributes = _place(corner, width, height)
        if look.fill:
            attributes["fillcolor"] = look.fill
        if look.border and (look.border != PAPER or width >= _PARTED):
            attributes |= {"color": look.border, "penwidth": f"{look.penwidth:g}"}
        style = ",".join(filter(None, ["filled" if look.fill else "", look.style]))
        if style:
            attributes["style"] = style
        if label:
            attributes |= {"label": quoted(label), "fontsize": f"{size:.3g}"}
            if colour != INK:
                attributes["fontcolor"] = colour
        if tooltip:
            attributes["tooltip"] = quoted(tooltip)
        self.picture.node(node, **attributes)
        return node

    def text(
        self,
        corner: Point,
        width: float,
        height: float,
        text: str,
        *,
        size: float = 10,
        align: Align = "left",
        bold: bool = False,
        colour: str = INK,
    ) -> None:
        """Draw a line of text, vertically centred in an invisible rectangle."""
        attributes = _place(corner, width, height)
        if bold:
            attributes["fontname"] = BOLD_FONT
        if colour != INK:
            attributes["fontcolor"] = colour
        attributes |= {"label": quoted(text) + _JUSTIFY[align], "fontsize": f"{size:.3g}"}
        self.picture.node(self._fresh(), **attributes)

    def band(self, corner: Point, width: float, height: float, colour: str) -> None:
        """Draw a filled rectangle below everything else; draw all bands before the first box."""
        (x, y), middle = corner, corner[1] + height / 2
        ends = [self.box((at, y), 0, height, BoxStyle()) for at in (x, x + width)]
        # Only an edge can be under other edges, so the band is an edge as thick as it is high.
        path = [(at, middle) for at in (x, x + width / 3, x + width * 2 / 3, x + width)]
        self.picture.edge(
            *ends, pos=_spline(path), color=colour, penwidth=f"{height:.5g}", arrowhead="none"
        )

    def arrow(
        self, tail: str, head: str, path: Sequence[Point], stroke: ArrowStyle, *, tooltip: str = ""
    ) -> None:
        """Draw an arrow between two boxes along a Bézier curve of 3n + 1 points."""
        *curve, before, tip = path
        reach = math.hypot(tip[0] - before[0], tip[1] - before[1]) or 1.0
        part = min(_HEAD / reach, 1.0)
        base = (tip[0] - part * (tip[0] - before[0]), tip[1] - part * (tip[1] - before[1]))
        attributes = {
            # Graphviz wants the tip of the arrow's head first, then the curve up to its base.
            "pos": f"e,{_spline([tip])} {_spline([*curve, before, base])}",
            "arrowsize": f"{_HEAD / _HEAD_OF_SIZE_1:g}",
            "color": stroke.colour,
            "style": stroke.style,
            "penwidth": f"{stroke.penwidth:g}",
        }
        if tooltip:
            attributes["tooltip"] = quoted(tooltip)
        self.picture.edge(tail, head, **attributes)

    def _fresh(self) -> str:
        self._unnamed += 1
        return f"_{self._unnamed}"


def _spline(path: Sequence[Point]) -> str:
    return " ".join(f"{x:.6g},{-y:.6g}" for x, y in path)


def _place(corner: Point, width: float, height: float) -> dict[str, str]:
    x, y = corner[0] + width / 2, corner[1] + height / 2
    return {
        "pos": f"{x:.6g},{-y:.6g}",
        "width": f"{width / POINTS_PER_INCH:.5g}",
        "height": f"{height / POINTS_PER_INCH:.5g}",
    }
