"""A picture: a graphviz object that shows itself and writes files without the ``dot`` program."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import overload

import graphviz  # type: ignore[import-untyped]

from fxpipe.draw.colours import INK, PAPER
from fxpipe.draw.layout import check_format, lay_out

FONT = "Helvetica"
"""A core font of PDF, which every system replaces by a sans-serif of its own where it lacks it."""
BOLD_FONT = "Helvetica-Bold"

_WIDTH = re.compile(r'<svg width="([0-9.]+)pt"')


class Picture(graphviz.Digraph):  # type: ignore[misc]
    """A ``graphviz.Digraph`` that Graphviz draws inside this process.

    ``source`` is its DOT, which ``save`` writes; ``pipe`` gives the picture's bytes, ``render``
    writes them to a file, and Jupyter shows it as SVG.
    """

    @overload
    def pipe(
        self,
        format: str | None = None,
        *,
        engine: str | None = None,
        encoding: None = None,
        quiet: bool = False,
    ) -> bytes: ...
    @overload
    def pipe(
        self,
        format: str | None = None,
        *,
        engine: str | None = None,
        encoding: str,
        quiet: bool = False,
    ) -> str: ...
    def pipe(
        self,
        format: str | None = None,
        *,
        engine: str | None = None,
        encoding: str | None = None,
        quiet: bool = False,
    ) -> bytes | str:
        """The drawn picture.

        Args:
            format: ``svg``, ``png``, ``pdf``, …; the picture's own ``format`` where not given.
            engine: a layout engine; the picture's own where not given.
            encoding: gives text in this encoding instead of bytes.
            quiet: part of graphviz's signature; there is no program to silence.

        Raises:
            InputError: the format is unknown.
        """
        data = self._drawn(format or self.format, engine)
        return data if encoding is None else data.decode(encoding)

    def render(
        self,
        filename: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
        *,
        outfile: str | os.PathLike[str] | None = None,
        engine: str | None = None,
        quiet: bool = False,
        quiet_view: bool = False,
    ) -> str:
        """Write the picture, and nothing else, to a file.

        Args:
            filename: the path; where it does not end in its format, the ending is added.
            directory: the folder that ``filename`` is relative to.
            view: whether to open the file in the system's viewer.
            cleanup: part of graphviz's signature; no source file is left to clean up.
            format: the format, where the path's ending does not tell it.
            outfile: another word for ``filename``.
            engine: a layout engine; the picture's own where not given.
            quiet: part of graphviz's signature.
            quiet_view: whether to silence the viewer.

        Returns:
            The path of the file.

        Raises:
            InputError: the format is unknown.
        """
        path = Path(directory or "", outfile or filename or self.name or "picture")
        ending = path.suffix.removeprefix(".")
        wanted = check_format(format or ending or self.format)
        if ending.lower() != wanted:
            path = path.with_name(f"{path.name}.{wanted}")
        data = self._drawn(wanted, engine)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if view or quiet_view:
            self._view(str(path), format=wanted, quiet=quiet_view)
        return str(path)

    def _repr_svg_(self) -> str:
        """The picture as a page shows it: one that is too wide shrinks, down to three fifths of
        its size; beyond that it scrolls."""
        return _WIDTH.sub(
            r'<svg width="\1pt" style="max-width: max(100%, calc(0.6 * \1pt)); height: auto"',
            self._drawn("svg").decode(),
            count=1,
        )

    def _repr_image_svg_xml(self) -> str:
        """The same, for front ends that ask graphviz for a mime bundle."""
        return self._repr_svg_()

    def _drawn(self, format: str, engine: str | None = None) -> bytes:
        own: str = self.graph_attr.get("layout", self.engine)
        return lay_out(self.source, engine=engine or own, format=format)


def blank(name: str, **graph: str) -> Picture:
    """An empty picture in the library's style.

    Args:
        name: what ``render`` names its file, where not told.
        graph: further attributes of the graph.
    """
    text = {"fontname": FONT, "fontsize": "10", "fontcolor": INK}
    return Picture(
        name,
        format="svg",
        graph_attr={"bgcolor": PAPER, "pad": "0.12", **text, **graph},
        node_attr={"shape": "rect", "margin": "0", "color": INK, **text},
        edge_attr={"color": INK, "arrowsize": "0.6", **text},
    )


def plain(text: str) -> str:
    """A label that shows exactly ``text``: no escape, entity or markup is read in it."""
    lines = [graphviz.escape(_printable(line).replace("&", "&amp;")) for line in text.split("\n")]
    label: str = graphviz.nohtml(r"\n".join(lines))
    return label


def markup(text: str) -> str:
    """The same for a text inside an HTML-like label."""
    # Graphviz reads escapes such as \N there too, and knows no way to write a backslash itself.
    return escape(_printable(text)).replace("\\", "\\\N{ZERO WIDTH SPACE}")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
