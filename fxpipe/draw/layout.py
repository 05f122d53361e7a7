"""Graphviz inside this process: DOT in, a picture's bytes out, no ``dot`` program."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pygraphviz  # type: ignore[import-untyped]

from fxpipe.errors import InputError, near

FORMATS = frozenset(
    ("dot", "eps", "gif", "gv", "jpeg", "jpg", "json", "pdf", "png", "ps", "svg", "svgz", "xdot")
)
"""What the Graphviz of pygraphviz's wheels writes on every system."""

PLACED = "nop2"
"""The layout of a graph whose nodes and edges all have their positions already."""

_BITMAPS = frozenset({"gif", "jpeg", "jpg", "png"})
_BITMAP_DPI = "144"

_NOISE = re.compile(r"Fontconfig (warning|error)|Warning: (font name|node .* too small for label)")

_lock = threading.Lock()


def check_format(name: str) -> str:
    """Return the format's name in lower case, or raise InputError with the near ones."""
    wanted = name.lower()
    if wanted not in FORMATS:
        raise InputError(f"pictures have no format {name!r}: {near(wanted, FORMATS)}")
    return wanted


def lay_out(source: str, *, engine: str, format: str) -> bytes:
    """Draw DOT.

    Args:
        source: a graph in DOT.
        engine: a layout engine of Graphviz, or PLACED.
        format: one of FORMATS.

    Raises:
        InputError: the format is unknown, or Graphviz refuses the graph.
    """
    wanted = check_format(format)
    # Graphviz keeps global state, so only one thread may be in it.
    with _lock, _stderr_kept():
        try:
            graph = pygraphviz.AGraph(string=source)
            if wanted in _BITMAPS and "dpi" not in graph.graph_attr:
                graph.graph_attr["dpi"] = _BITMAP_DPI
            if engine == PLACED:
                # Given as ``prog``, it would warn of a slow layout where nothing is laid out.
                graph.has_layout = True
            data: bytes = graph.draw(format=wanted, prog=None if engine == PLACED else engine)
        except Exception as error:
            raise InputError(f"Graphviz cannot draw this as {wanted}: {error}") from error
    return data


@contextmanager
def _stderr_kept() -> Iterator[None]:
    """Hold back what C code writes to stderr, and let all but the known noise through after.

    Fontconfig inside the wheel complains of newer systems' configuration, which nobody can mend.
    """
    try:
        real = os.dup(2)
    except OSError:  # A program without a console has no stderr.
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            kept.seek(0)
            for line in kept.read().splitlines(keepends=True):
                if not _NOISE.match(line.decode(errors="replace")):
                    os.write(2, line)
