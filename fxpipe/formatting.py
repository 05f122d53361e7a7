"""Quantities and lists of numbers as short texts, and what a notebook shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.extend import find

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def without_addresses(text: str) -> str:
    """Text in which ``repr`` of an object names no place in this process's memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def bytes_text(count: float) -> str:
    """``2.0 MiB``."""
    size, unit = byte_unit(count)
    return f"{count:.0f} B" if size == 1 else f"{count / size:.1f} {unit}"


def byte_unit(count: float) -> tuple[int, str]:
    """The unit in which so many bytes are written, as its bytes and its name."""
    if count < 1024:
        return 1, "B"
    power = 1
    while count >= 1023.95 * 1024**power and power < len(_UNITS):
        power += 1
    return 1024**power, _UNITS[power - 1]


_DRAWN = 4000
"""A notebook shows no picture of more things: it would take seconds and be unreadable."""


def shown(value: Any, things: int) -> dict[str, str]:
    """What a notebook shows of a value that can be drawn, by MIME type; without pictures, its text.

    Args:
        things: how many things its picture has; if there are too many, only text is shown.
    """
    bundle = {"text/plain": repr(value)}
    if things <= _DRAWN:
        try:
            picture = find("view", f"{type(value).__name__}.draw")(value)
        except FxpipeError:  # the extension is not there
            return bundle
        bundle["image/svg+xml"] = picture._repr_svg_()
    return bundle


def plural(count: int, word: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def stages_text(stages: Sequence[int]) -> str:
    """``stage 3``, ``stages 0-2 and 5``, from ascending numbers."""
    return f"stage{'' if len(stages) == 1 else 's'} {numbers_text(stages)}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Ascending numbers, with runs abbreviated: ``0, 2-5 and 9``."""
    words = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
