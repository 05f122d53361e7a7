"""The colours of all pictures, which people with any kind of colour vision can tell apart.

The palette is that of Okabe and Ito, "Color Universal Design" (2008),
https://jfly.uni-koeln.de/color/. No picture tells anything by colour alone: a letter, a line
style or a border says it too.
"""

from __future__ import annotations

FORWARD = "#56B4E9"
"""Sky blue."""

BACKWARD = "#E69F00"
"""Orange."""

UPDATE = "#009E73"
"""Bluish green."""

INPUT = "#F0E442"
"""Yellow: what comes from the caller or goes to it."""

PARAMETER = "#CC79A7"
"""Reddish purple."""

SKIP = "#0072B2"
"""Blue: a value that skips stages."""

GRADIENT = "#D55E00"
"""Vermilion: a gradient on its way back."""

FAULT = "#CC0000"
"""A pure red, outside the palette; always with a thick border."""

IDLE = "#F0F0F0"
INK = "#222222"
FAINT = "#8A8A8A"
PAPER = "#FFFFFF"
OTHER = "#CFCFCF"
"""A user-defined kind of task."""

_LIGHTEST = 0.75

TASKS: dict[str, str] = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": PARAMETER,
    "W": INPUT,
    "R": GRADIENT,
    "C": SKIP,
    "U": UPDATE,
}
"""Letter of a task's kind → its colour."""


def tint(colour: str, number: int) -> str:
    """The colour itself for 0, lighter for 1, and so on, but never as light as the paper."""
    share = _LIGHTEST * (1 - 0.55**number)
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)
