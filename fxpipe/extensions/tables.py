"""Tables, lists of names and quantities as short texts, for the extensions that show some."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import fill

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table


def time_text(seconds: float) -> str:
    """``3.2 ms``, with three digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def plain_table(gap: int = 2) -> Table:
    """An empty table without frames and with narrow gaps, so that much fits into a line."""
    padding = (0, gap - 1, 0, 0)
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)


def screen_width() -> int:
    """The columns of the terminal that standard output is; 80 where it is none."""
    shown = sys.stdout is not None and sys.stdout.isatty()  # None if it is closed
    return shutil.get_terminal_size((80, 24)).columns if shown else 80


def table_text(table: Table) -> str:
    """A table as plain text, as wide as the screen. No cell is wrapped but those of a column with a
    ``ratio``, which has prose: columns that do not fit come below the others, behind the first one
    again."""
    first, *others = table.columns
    blocks = [[first]]
    for column in others:
        if len(blocks[-1]) > 1 and _width(table, [*blocks[-1], column]) > screen_width():
            blocks.append([first])
        blocks[-1].append(column)
    texts = []
    for columns in blocks:
        block = plain_table()
        block.padding, block.show_header = table.padding, table.show_header
        for column in columns:
            block.add_column(column.header, justify=column.justify, no_wrap=not column.ratio)
        for cells in zip(*(column.cells for column in columns), strict=True):
            block.add_row(*cells)
        prose = any(column.ratio for column in columns)
        width = screen_width() if prose else _width(table, columns)
        # else rich would also show an empty output in a notebook
        console = Console(width=width, color_system=None, force_jupyter=False, emoji=False)
        with console.capture() as capture:
            console.print(block)
        texts += [line.rstrip() for line in capture.get().rstrip().splitlines()]
    return "\n".join(texts)


_PROSE = 20
"""The least columns of the screen that prose takes."""


def _width(table: Table, columns: Sequence[Column]) -> int:
    """The columns of the screen that these columns of a table take."""
    cells = [[column.header, *column.cells] for column in columns]
    widths = [max(len(str(cell)) for cell in own) for own in cells]
    taken = [_PROSE if c.ratio else width for c, width in zip(columns, widths, strict=True)]
    return sum(taken) + (len(columns) - 1) * (1 + table.padding[1])


def wrapped(text: str, indent: str = "", *, whole_words: bool = False) -> str:
    """Text in lines as wide as the screen; further lines are indented. ``whole_words`` keeps a word
    in one line even if that is too long, as a path that is to be copied."""
    return fill(
        text,
        screen_width(),
        subsequent_indent=indent,
        break_long_words=not whole_words,
        break_on_hyphens=False,
    )


SERIAL = "one thread runs all devices, one after another"
"""What tables say of a pipe in which that is so."""

_told: set[str] = set()


def first_time(text: str) -> bool:
    """Whether this process has not shown a text yet, such as a legend; it has from now on."""
    new = text not in _told
    _told.add(text)
    return new


def count_text(count: int) -> str:
    """``1.2 M``; small numbers exactly."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= max(0.99995 * size, 10**4):  # never 1000.0 of the unit below
            return f"{count / size:.1f} {unit}"
    return str(count)


def shape_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """``8×64×32×32 float32``."""
    sizes = "×".join(map(str, shape)) or "scalar"
    return f"{sizes} {str(dtype).removeprefix('torch.')}"


def runs(names: Iterable[str]) -> list[str]:
    """Names, with runs of numbers abbreviated: ``blocks.0–3`` for blocks.0 to blocks.3."""
    texts = []
    for _, group in groupby(enumerate(names), _run):
        run = [name for _, name in group]
        end = f"–{run[-1].rpartition('.')[2]}" if len(run) > 1 else ""
        texts.append(run[0] + end)
    return texts


def _run(indexed: tuple[int, str]) -> tuple[str, int | None]:
    """A key that the names of one run share: number minus index is the same for all of them."""
    index, name = indexed
    parent, _, last = name.rpartition(".")
    if last.isascii() and last.isdecimal():
        return parent, int(last) - index
    return name, None


def lines(names: Sequence[str], width: int, most: int) -> list[str]:
    """Names separated by commas, in at most ``most`` lines of at most ``width`` characters.

    A further line tells how many names are left out. A name that is wider than a line keeps its
    end, which distinguishes it best.
    """
    short = [name if len(name) <= width else "…" + name[1 - width :] for name in names]
    rows = [""]
    for index, name in enumerate(short):
        joined = f"{rows[-1]}, {name}" if rows[-1] else name
        if len(joined) <= width:
            rows[-1] = joined
            continue
        rows[-1] += ","
        if len(rows) == most:
            return [*rows, f"… and {len(short) - index} more"]
        rows.append(name)
    return rows
