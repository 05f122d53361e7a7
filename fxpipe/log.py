"""Report the passes of a compilation as they run, to the logger ``fxpipe``.

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
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

LOGGER = logging.getLogger("fxpipe")

PATIENCE = 3.0
"""Seconds after which a compilation says that it takes long."""


@dataclass(eq=False)
class _Compilation:
    """What is compiled, the pass that began last, and how many passes have ended."""

    what: str
    now: str = ""
    passes: int = 0


_running: ContextVar[_Compilation | None] = ContextVar("fxpipe_compilation", default=None)


class _Waiting:
    """Says that a compilation takes long, once it does, from a thread of its own.

    Args:
        compilation: knows the pass.
        line: whether to show a line with the pass and the seconds, if standard error is a terminal.
    """

    def __init__(self, compilation: _Compilation, *, line: bool) -> None:
        self._compilation = compilation
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
        return f"compiling {self._compilation.what}, for {seconds:.0f} s: {self._compilation.now}"


@contextmanager
def reported(what: str, *, line: bool = True) -> Iterator[None]:
    """Report the passes inside the block to the logger.

    If the block takes long, the logger is told, and a terminal then shows a ``line`` with the pass
    that runs, until the block ends. Nested blocks say nothing of this. The total time is told if
    some pass has run; most calls run none, as everything is compiled already.
    """
    compilation = _Compilation(what)
    waiting = _Waiting(compilation, line=line) if _running.get() is None else None
    start = time.perf_counter()
    token = _running.set(compilation)
    try:
        yield
    finally:
        _running.reset(token)
        if waiting is not None:
            waiting.end()
    if compilation.passes:
        LOGGER.info("compiled %s in %.3f s", what, time.perf_counter() - start)


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Report the block as a pass of that name, unless it raises."""
    compilation = _running.get()
    if compilation is not None:
        compilation.now = name
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    LOGGER.debug(
        "%s took %.6f s", name, seconds, extra={"fxpipe_pass": name, "fxpipe_seconds": seconds}
    )
    if compilation is not None:
        compilation.passes += 1
