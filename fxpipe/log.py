"""Report the passes of a compilation as they run: to the logger ``fxpipe`` and on standard error.

Each pass is a debug record. The record has the pass's name and seconds in its text and in its
attributes ``fxpipe_pass`` and ``fxpipe_seconds``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.status import Status

LOGGER = logging.getLogger("fxpipe")

WIDTH = 28
"""The width of the column of pass names, in characters."""


class Listener:
    """Is notified of the passes of one compilation, and prints them if there is a console.

    Args:
        what: what is compiled, for messages.
        console: where passes are printed; None prints nothing.
    """

    def __init__(self, what: str = "", console: Console | None = None) -> None:
        self._passes = 0
        self._what = what
        self._console = console
        self._status: Status | None = None

    def begins(self, name: str) -> None:
        """A pass begins; passes may be nested."""
        if self._console is None:
            return
        line = f"compiling {self._what}: {name}"
        if self._status is None:
            self._console.print(f"compiling {self._what}", highlight=False, markup=False)
            self._status = self._console.status(line)
            self._status.start()
        self._status.update(line)

    def ends(self, name: str, seconds: float) -> None:
        """A pass is done; not called for a pass that raised."""
        self._passes += 1
        self.notes(f"{name:<{WIDTH}} {1e3 * seconds:9.1f} ms")

    def notes(self, text: str) -> None:
        """Print a line, such as that something cannot be done as the user asked."""
        if self._console is not None:
            self._console.print(f"  {text}", highlight=False, markup=False)

    def close(self, seconds: float, *, done: bool) -> None:
        """Remove the status line, and report the total time if the compilation is ``done`` and
        some pass has run; most calls run none, as everything is compiled already."""
        if self._status is not None:
            self._status.stop()
        if done and self._passes:
            LOGGER.info("compiled %s in %.3f s", self._what, seconds)
            self.ends("in all", seconds)


_listener: ContextVar[Listener | None] = ContextVar("fxpipe_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Notify the listener of every pass that this thread runs inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def reported(what: str, verbose: bool) -> Iterator[None]:
    """Report the passes inside the block to the logger, and if ``verbose`` on standard error."""
    listener = Listener(what, Console(stderr=True) if verbose else None)
    start = time.perf_counter()
    done = False
    try:
        with listening(listener):
            yield
        done = True
    finally:
        listener.close(time.perf_counter() - start, done=done)


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Report the block as a pass of that name."""
    listener = _listener.get()
    if listener is not None:
        listener.begins(name)
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    LOGGER.debug(
        "%s took %.6f s", name, seconds, extra={"fxpipe_pass": name, "fxpipe_seconds": seconds}
    )
    if listener is not None:
        listener.ends(name, seconds)


def noted(text: str) -> None:
    """Report something that cannot be done as the user asked."""
    LOGGER.info("%s", text)
    listener = _listener.get()
    if listener is not None:
        listener.notes(text)
