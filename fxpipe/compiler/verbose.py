"""A compilation as people see it: every pass with its time, and a line that says what goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from fxpipe.telling import LOGGER, listening

WIDTH = 28
"""Characters of a pass's name before its time."""


class Compilation:
    """Listens to the passes of one call; most calls have none, as all is compiled already.

    Attributes:
        passes: how many are done.
    """

    def __init__(self, what: str, console: Console | None) -> None:
        """Nothing has begun.

        Args:
            what: is compiled.
            console: on which passes are printed; None prints nothing.
        """
        self.passes = 0
        self._what = what
        self._console = console
        self._status: Status | None = None

    def begins(self, name: str) -> None:
        """See Listener.begins."""
        if self._console is None:
            return
        line = f"compiling {self._what}: {name}"
        if self._status is None:
            self._console.print(f"compiling {self._what}", highlight=False, markup=False)
            self._status = self._console.status(line)
            self._status.start()
        self._status.update(line)

    def ends(self, name: str, seconds: float) -> None:
        """See Listener.ends."""
        self.passes += 1
        self._print(name, seconds)

    def notes(self, text: str) -> None:
        """See Listener.notes."""
        if self._console is not None:
            self._console.print(f"  {text}", highlight=False, markup=False)

    def close(self, seconds: float, *, done: bool) -> None:
        """It is over; the line goes, and the whole time is told."""
        if self._status is not None:
            self._status.stop()
        if done and self.passes:
            LOGGER.info("compiled %s in %.3f s", self._what, seconds)
            self._print("in all", seconds)

    def _print(self, name: str, seconds: float) -> None:
        if self._console is not None:
            line = f"  {name:<{WIDTH}} {1e3 * seconds:9.1f} ms"
            self._console.print(line, highlight=False, markup=False)


@contextmanager
def told(what: str, verbose: bool) -> Iterator[None]:
    """Tell of the passes inside: to the logger, and, where asked for, on standard error."""
    compilation = Compilation(what, Console(stderr=True) if verbose else None)
    start = time.perf_counter()
    done = False
    try:
        with listening(compilation):
            yield
        done = True
    finally:
        compilation.close(time.perf_counter() - start, done=done)
