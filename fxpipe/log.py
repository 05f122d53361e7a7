"""What compiling is doing, told while it happens: to the logger ``fxpipe``, and on standard error.

Each pass is a debug record of its name and its seconds, which the record also has as attributes
``fxpipe_pass`` and ``fxpipe_seconds``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from rich.console import Console
from rich.status import Status

LOGGER = logging.getLogger("fxpipe")


class Listener(Protocol):
    """Who is told of passes."""

    def begins(self, name: str) -> None:
        """A pass begins, maybe inside of another one."""

    def ends(self, name: str, seconds: float) -> None:
        """It is done; not called where it raised."""

    def notes(self, text: str) -> None:
        """Something is not as it was asked for."""


_listener: ContextVar[Listener | None] = ContextVar("fxpipe_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, and in this thread, it is told of every pass."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def telling(name: str) -> Iterator[None]:
    """What happens inside is a pass of that name."""
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
    """Tell of something that is not as it was asked for."""
    LOGGER.info("%s", text)
    listener = _listener.get()
    if listener is not None:
        listener.notes(text)


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
