"""Drawing by hand on a graphviz picture: boxes, texts, lines and arrows at given places.

Lengths are in points, x to the right and y down. The picture is placed already (``PLACED``), so
the ``dot`` program and other Graphviz viewers put everything at the same spots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fxpipe.draw.colours import FAINT, INK
from fxpipe.draw.layout import PLACED
from fxpipe.draw.picture import BOLD_FONT, Picture, blank, plain

Point = tuple[float, float]
Align = Literal["left", "centre", "right"]

_POINTS_PER_INCH = 72
_JUSTIFY: dict[Align, str] = {"left": r"\l", "centre": "", "right": r"\r"}

_NARROW = frozenset(" .,:;'|()[]ijlIft·")
_WIDE = frozenset("@%mMwW=+−×…→")
_BOLD = 1.15


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Points that a text takes at most, about: those of DejaVu Sans, a wide font."""
    return _ems(text) * size * (_BOLD if bold else 1)


@lru_cache(maxsize=4096)
def _ems(text: str) -> float:
    return sum(
        0.4 if c in _NARROW else 1.0 if c in _WIDE else 0.75 if c.isupper() else 0.65 for c in text
    )


@dataclass(frozen=True)
class Look:
    """How a box looks; a part without a colour is not there.

    Attributes:
        fill: colour inside.
        border: colour of the outline.
        penwidth: width of the outline.
        style: ``dashed``, ``dotted`` or ``rounded``, or nothing.
    """

    fill: str = ""
    border: str = ""
    penwidth: float = 0.6
    style: str = ""


@dataclass(frozen=True)
class Stroke:
    """How an arrow looks."""

    colour: str = INK
    style: str = "solid"
    penwidth: float = 0.8


class Canvas:
    """A picture that is filled by hand; ``picture`` is the result.

    What is drawn later lies over what was drawn before, and arrows lie over everything.
    """

    def __init__(self, name: str) -> None:
        self.picture: Picture = blank(name, layout=PLACED, outputorder="nodesfirst")
        self.picture.node_attr.update(fixedsize="true", penwidth="0", label="")
        self._unnamed = 0

    def box(
        self,
        corner: Point,
        width: float,
        height: float,
        look: Look,
        *,
        label: str = "",
        size: float = 9,
        tooltip: str = "",
        name: str = "",
    ) -> str:
        """A rectangle with its upper left corner given; returns its node's name."""
        node = name or self._fresh()
        attributes = _place(corner, width, height)
        if look.fill:
            attributes["fillcolor"] = look.fill
        if look.border:
            attributes |= {"color": look.border, "penwidth": f"{look.penwidth:g}"}
        style = ",".join(filter(None, ["filled" if look.fill else "", look.style]))
        if style:
            attributes["style"] = style
        if label:
            attributes |= {"label": plain(label), "fontsize": f"{size:.3g}"}
        if tooltip:
            attributes["tooltip"] = plain(tooltip)
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
    ) -> None:
        """A line of text in an invisible rectangle, in the middle of its height."""
        attributes = _place(corner, width, height)
        if bold:
            attributes["fontname"] = BOLD_FONT
        attributes |= {"label": plain(text) + _JUSTIFY[align], "fontsize": f"{size:.3g}"}
        self.picture.node(self._fresh(), **attributes)

    def rule(self, corner: Point, width: float, height: float, colour: str = FAINT) -> None:
        """A straight line, as a thin filled rectangle."""
        self.box(corner, width, height, Look(colour))

    def arrow(
        self, tail: str, head: str, path: Sequence[Point], stroke: Stroke, *, tooltip: str = ""
    ) -> None:
        """An arrow between two boxes along a Bézier curve of 3n + 1 points."""
        points = [f"{x:.6g},{-y:.6g}" for x, y in path]
        attributes = {
            # Graphviz wants the tip of the arrow first, then the curve that ends at its base.
            "pos": " ".join([f"e,{points[-1]}", *points]),
            "color": stroke.colour,
            "style": stroke.style,
            "penwidth": f"{stroke.penwidth:g}",
        }
        if tooltip:
            attributes["tooltip"] = plain(tooltip)
        self.picture.edge(tail, head, **attributes)

    def _fresh(self) -> str:
        self._unnamed += 1
        return f"_{self._unnamed}"


def _place(corner: Point, width: float, height: float) -> dict[str, str]:
    x, y = corner[0] + width / 2, corner[1] + height / 2
    return {
        "pos": f"{x:.6g},{-y:.6g}",
        "width": f"{width / _POINTS_PER_INCH:.5g}",
        "height": f"{height / _POINTS_PER_INCH:.5g}",
    }
