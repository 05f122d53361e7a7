"""Quantities and lists of names, short enough for a label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch


def count_text(count: int) -> str:
    """``1.2 M``; small numbers exactly."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= max(size, 10**4):
            return f"{count / size:.1f} {unit}"
    return str(count)


def plural(count: int, word: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """``8×64×32×32 float32``."""
    sizes = "×".join(map(str, shape)) or "scalar"
    return f"{sizes} {str(dtype).removeprefix('torch.')}"


def runs(names: Iterable[str]) -> list[str]:
    """Names with runs of numbers drawn together: ``blocks.0–3`` for blocks.0 to blocks.3."""
    found = []
    for _, group in groupby(enumerate(names), _run):
        run = [name for _, name in group]
        more = f"–{run[-1].rpartition('.')[2]}" if len(run) > 1 else ""
        found.append(run[0] + more)
    return found


def _run(placed: tuple[int, str]) -> tuple[str, int | None]:
    """What the names of one run share: their numbers grow as their places do."""
    place, name = placed
    parent, _, last = name.rpartition(".")
    if last.isascii() and last.isdecimal():
        return parent, int(last) - place
    return name, None


def lines(names: Sequence[str], width: int, most: int) -> list[str]:
    """Names with commas between, in lines of so many characters, at most so many lines.

    A further line tells how many names are left out. A name that is wider than a line keeps its
    end, which tells it from others.
    """
    short = [name if len(name) <= width else "…" + name[1 - width :] for name in names]
    rows = [""]
    for place, name in enumerate(short):
        joined = f"{rows[-1]}, {name}" if rows[-1] else name
        if len(joined) <= width:
            rows[-1] = joined
        elif len(rows) < most:
            rows[-1] += ","
            rows.append(name)
        else:
            rows[-1] += ","
            rows.append(f"… and {len(short) - place} more")
            break
    return rows
