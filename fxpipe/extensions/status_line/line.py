"""One line on the terminal, or in a notebook, while something takes long; gone when it is done.

``rich.status`` would need ipywidgets in notebooks, and would put its own streams in the place of
``sys.stdout`` and ``sys.stderr`` while the user's code runs.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

AFTER = 3.0
"""The seconds after which the line appears."""

_AGAIN = 0.5
"""The seconds between two updates of the line."""


@contextmanager
def showing(text: Callable[[], str]) -> Iterator[None]:
    """Show the text and the seconds so far on standard error, from ``AFTER`` seconds on until the
    block ends. Nothing if standard error is neither a terminal nor a notebook's."""
    stream = sys.stderr
    if not erases(stream):
        yield
        return
    line = _Line(stream, text)
    try:
        yield
    finally:
        line.end()


def erases(stream: TextIO | None) -> bool:
    """Whether a carriage return goes back to the start of the line."""
    with suppress(Exception):  # such as a stream that is closed, or somebody's own
        kind = type(stream).__module__
        if stream is not None and kind.startswith("ipykernel."):
            return True
        if kind.startswith("rich."):  # which shows something live, and would put lines above it
            return False
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return False


class OneLine:
    """One line of a stream, each text of which is written over the one before."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def write(self, text: str) -> None:
        """Write a text, cut off where the terminal ends; "" erases the line."""
        text = text[: shutil.get_terminal_size((80, 24)).columns - 1]
        self._stream.write(f"\r{text}{' ' * (self._width - len(text))}\r")
        self._stream.flush()
        self._width = len(text)


class _Line:
    """A thread that writes the line: the caller's may be busy."""

    def __init__(self, stream: TextIO, text: Callable[[], str]) -> None:
        self._line, self._text = OneLine(stream), text
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fxpipe-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):  # whatever becomes of the stream
            if self._ended.wait(AFTER):
                return
            while not self._ended.wait(_AGAIN):
                self._line.write(f"{self._text()} … {time.monotonic() - self._begin:.0f} s")
            self._line.write("")

    def end(self) -> None:
        """Erase the line."""
        self._ended.set()
        self._thread.join()
