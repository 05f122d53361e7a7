"""Report the passes of a compilation as they run: to the logger ``fxpipe`` and on standard error.

A compilation that takes long says so once at level INFO, and on a terminal shows which pass it is
in until it ends. Each pass is a debug record. The record has the pass's name and seconds in its
text and in its attributes ``fxpipe_pass`` and ``fxpipe_seconds``.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.text import Text

LOGGER = logging.getLogger("fxpipe")

WIDTH = 28
"""The width of the column of pass names, in characters."""


PATIENCE = 3.0
"""Seconds after which a compilation says that it takes long."""


class Listener:
    """Is notified of the passes of one compilation, and prints them if there is a console.

    Args:
        what: what is compiled, for messages.
        console: where passes are printed; None prints nothing.
    """

    def __init__(self, what: str = "", console: Console | None = None) -> None:
        self.now = ""  # the pass that began last
        self._passes = 0
        self._what = what
        self._console = console
        self._status: Status | None = None

    def begins(self, name: str) -> None:
        """A pass begins; passes may be nested."""
        self.now = name
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


class _Waiting:
    """Says that a compilation takes long, once it does, from a thread of its own.

    Args:
        listener: knows the pass.
        what: what is compiled.
        line: whether to show a line with the pass and the seconds, if standard error is a terminal.
    """

    def __init__(self, listener: Listener, what: str, *, line: bool) -> None:
        self._listener = listener
        self._what = what
        self._start = time.perf_counter()
        self._live: Live | None = None
        self._line = line
        self._lock = threading.Lock()
        self._ended = False
        self._timer = threading.Timer(PATIENCE, self._late)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Say no more, and remove the line."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._live is not None:
                self._live.stop()
        self._timer.join()

    def _late(self) -> None:
        with self._lock:
            if self._ended:
                return
            LOGGER.info("still %s", self._text())
            console = Console(stderr=True)
            if self._line and sys.stderr.isatty() and not console.is_dumb_terminal:
                self._live = Live(
                    console=console,
                    get_renderable=lambda: Text(self._text(), no_wrap=True, overflow="ellipsis"),
                    transient=True,
                    # the program may redirect these itself, and would restore what is no more
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()

    def _text(self) -> str:
        seconds = time.perf_counter() - self._start
        return f"compiling {self._what}, for {seconds:.0f} s: {self._listener.now}"


@contextmanager
def reported(what: str, verbose: bool, *, line: bool = True) -> Iterator[None]:
    """Report the passes inside the block to the logger, and if ``verbose`` on standard error.

    If the block takes long, the logger is told; without ``verbose`` a terminal then shows a
    ``line`` with the pass that runs, until the block ends. Nested blocks say nothing of this.
    """
    listener = Listener(what, Console(stderr=True) if verbose else None)
    waiting = None
    if _listener.get() is None:
        waiting = _Waiting(listener, what, line=line and not verbose)
    start = time.perf_counter()
    done = False
    try:
        with listening(listener):
            yield
        done = True
    finally:
        if waiting is not None:
            waiting.end()
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
