"""Pictures: graphviz graphs that Graphviz draws inside this process, to show or to write to files.

The palette can be told apart with any kind of colour vision: Okabe and Ito, "Color Universal
Design" (2008), https://jfly.uni-koeln.de/color/. No meaning rests on colour alone: a letter, a
line style or a border shows it too.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import graphviz  # type: ignore[import-untyped]

from fxpipe.errors import InputError, near

FORWARD = "#56B4E9"  # sky blue
BACKWARD = "#E69F00"  # orange
UPDATE = "#009E73"  # bluish green
INPUT = "#F0E442"  # yellow: inputs from the caller and outputs to it
PARAMETER = "#CC79A7"  # reddish purple
SKIP = "#0072B2"  # blue: a value that skips stages
GRADIENT = "#D55E00"  # vermilion: a gradient on its way back
FAULT = "#CC0000"  # a pure red, outside the palette; always with a thick border
SUM = "#999999"  # grey: gradients of replicas are summed
OTHER = "#CFCFCF"  # a user-defined kind of task
IDLE, INK, FAINT, PAPER = "#F0F0F0", "#222222", "#8A8A8A", "#FFFFFF"

_LIGHTEST = 0.75

TASKS: dict[str, str] = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": PARAMETER,
    "W": INPUT,
    "R": GRADIENT,
    "O": FAINT,
    "P": PAPER,
    "A": SUM,
    "C": SKIP,
    "G": SUM,
    "D": PAPER,
    "U": UPDATE,
}
"""Letter of a task's kind → its colour."""


def tint(colour: str, number: int, count: int) -> str:
    """The colour itself for number 0 of ``count``, and lighter in equal steps for the others, but
    never as light as the paper."""
    share = _LIGHTEST * number / count
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


FORMATS = frozenset(
    ("dot", "eps", "gif", "gv", "jpeg", "jpg", "json", "pdf", "png", "ps", "svg", "svgz", "xdot")
)
"""The formats that the Graphviz in pygraphviz's wheels writes on every system."""

PLACED = "nop2"
"""The Graphviz engine for a graph whose nodes and edges all have positions already."""

_BITMAPS = frozenset({"gif", "jpeg", "jpg", "png"})
_BITMAP_DPI = "144"

_NOISE = re.compile(r"Fontconfig (warning|error)|Warning: (font name|node .* too small for label)")

_lock = threading.Lock()


def check_format(name: str) -> str:
    """Return the format's name in lower case, or raise InputError with similar names."""
    wanted = name.lower()
    if wanted not in FORMATS:
        raise InputError(f"pictures have no format {name!r}: {near(wanted, FORMATS)}")
    return wanted


def lay_out(source: str, *, engine: str, format: str) -> bytes:
    """Return a DOT graph drawn in one of ``FORMATS``, laid out by a Graphviz engine or ``PLACED``.

    Raises:
        InputError: the format is unknown, or Graphviz refuses the graph.
    """
    import pygraphviz  # type: ignore[import-untyped]  # slow to import, and seldom needed

    wanted = check_format(format)
    # Graphviz has global state, so only one thread at a time may call it.
    with _lock, _stderr_kept():
        try:
            graph = pygraphviz.AGraph(string=source)
            if wanted in _BITMAPS and "dpi" not in graph.graph_attr:
                graph.graph_attr["dpi"] = _BITMAP_DPI
            if engine == PLACED:
                # With ``prog=PLACED`` pygraphviz would warn of a slow layout that never happens.
                graph.has_layout = True
            data: bytes = graph.draw(format=wanted, prog=None if engine == PLACED else engine)
        except Exception as error:
            raise InputError(f"Graphviz cannot draw this as {wanted}: {error}") from error
    return data


@contextmanager
def _stderr_kept() -> Iterator[None]:
    """Capture what C code writes to stderr, and write it afterwards without known noise.

    The wheel's Fontconfig complains about the configuration files of newer systems.
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


FONT = "Helvetica"
"""A core font of PDF; systems that lack it replace it by another sans-serif."""
BOLD_FONT = "Helvetica-Bold"
SIZE = 10.0
"""Of a font, in points, where nothing else is said."""

_WIDTH = re.compile(r'<svg width="([0-9.]+)pt" height="([0-9.]+)pt"')
_PAGE, _SHRUNK = 690.0, 0.65
"""The width of a page in points, and the smallest share of its size that a picture shrinks to."""


def _on_a_page(match: re.Match[str]) -> str:
    wide, high = map(float, match.groups())
    least = _SHRUNK * wide
    width = max(min(wide, _PAGE), least)
    size = f'width="{width:g}pt" height="{high * width / wide:g}pt"'
    return f'<svg {size} style="max-width: max(100%, {least:g}pt); height: auto"'


class Picture(graphviz.Digraph):  # type: ignore[misc]
    """A ``graphviz.Digraph`` that Graphviz draws inside this process.

    ``pipe`` returns the drawn picture, ``render`` writes it to a file, and Jupyter shows it as SVG.
    ``source`` is its DOT, which ``save`` writes.
    """

    @overload
    def pipe(self, format: str | None = None, *, encoding: None = None) -> bytes: ...
    @overload
    def pipe(self, format: str | None = None, *, encoding: str) -> str: ...
    def pipe(self, format: str | None = None, *, encoding: str | None = None) -> bytes | str:
        """Return the drawn picture as bytes, or as text if ``encoding`` is given.

        Args:
            format: ``svg``, ``png``, ``pdf``, …; by default the picture's own ``format``.
            encoding: the encoding of the text.

        Raises:
            InputError: the format is unknown.
        """
        data = self._drawn(format or self.format)
        return data if encoding is None else data.decode(encoding)

    def render(
        self,
        filename: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        view: bool = False,
        format: str | None = None,
        **_: object,
    ) -> str:
        """Write the picture, and nothing else, to a file. Further arguments of graphviz's method
        have no effect.

        Args:
            filename: the path; the format is appended if the path does not end in it.
            directory: the folder that ``filename`` is relative to.
            view: whether to open the file in the system's viewer.
            format: the format; by default the path's ending.

        Returns:
            The path of the file.

        Raises:
            InputError: the format is unknown.
        """
        path = Path(directory or "", filename or self.name or "picture")
        ending = path.suffix.removeprefix(".")
        wanted = check_format(format or ending or self.format)
        if ending.lower() != wanted:
            path = path.with_name(f"{path.name}.{wanted}")
        data = self._drawn(wanted)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if view:
            self._view(str(path), format=wanted, quiet=False)
        return str(path)

    def _repr_svg_(self) -> str:
        """The picture for a web page: a wide one shrinks, at most to ``_SHRUNK`` of its size, and
        then scrolls. The ``width`` attribute fits a page already, since many pages show the SVG as
        an image, which ignores the style."""
        return _WIDTH.sub(_on_a_page, self._drawn("svg").decode(), count=1)

    def _repr_image_svg_xml(self) -> str:
        """Like ``_repr_svg_``, for front ends that ask graphviz for a MIME bundle."""
        return self._repr_svg_()

    def _drawn(self, format: str) -> bytes:
        engine: str = self.graph_attr.get("layout", self.engine)
        return lay_out(self.source, engine=engine, format=format)


def blank(name: str, **graph: str) -> Picture:
    """An empty picture in the library's style; ``graph`` are further attributes of the graph."""
    text = {"fontname": FONT, "fontsize": f"{SIZE:g}", "fontcolor": INK}
    return Picture(
        name,
        format="svg",
        graph_attr={"bgcolor": PAPER, "pad": "0.12", **text, **graph},
        node_attr={"shape": "rect", "margin": "0", "color": INK, **text},
        edge_attr={"color": INK, "arrowsize": "0.6", **text},
    )


def quoted(text: str) -> str:
    """A label that shows exactly ``text``: its escapes, entities and markup are quoted."""
    lines = [graphviz.escape(printable(line).replace("&", "&amp;")) for line in text.split("\n")]
    label: str = graphviz.nohtml(r"\n".join(lines))
    return label


def printable(text: str) -> str:
    """The text with a mark in place of each character that fonts do not show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
