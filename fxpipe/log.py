"""Report the passes of a compilation as they run, to the logger ``fxpipe``.

Each compilation is an info record, and each pass a debug record. That has the pass's name and
seconds in its text and in its attributes ``fxpipe_pass`` and ``fxpipe_seconds``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from fxpipe.parts import Parts

LOGGER = logging.getLogger("fxpipe")


@dataclass
class _Compilation:
    """How many passes have run, and the name of the last one that has begun."""

    passes: int = 0
    name: str = ""


_innermost: ContextVar[_Compilation | None] = ContextVar("fxpipe_compilation", default=None)


@contextmanager
def reported(what: str, *, shows: bool = False) -> Iterator[None]:
    """Tell the logger how long the block took, if some pass has run in it; most calls run none, as
    everything is compiled already. If it ``shows`` and takes long, a line on the terminal says
    what is compiled, and which pass runs."""
    compilation = _Compilation()
    start = time.perf_counter()
    token = _innermost.set(compilation)

    def line() -> str:
        return f"fxpipe compiles {what}" + f": {compilation.name}" * bool(compilation.name)

    showing = Parts.showing.get() if shows and _is_seen() else None
    try:
        with nullcontext() if showing is None else showing(line):
            yield
    finally:
        _innermost.reset(token)
    if compilation.passes:
        LOGGER.info("compiled %s in %.3f s", what, time.perf_counter() - start)


def _is_seen() -> bool:
    """Whether standard error is a terminal, or a notebook's."""
    with suppress(Exception):  # such as a stream that is closed, or none
        return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    return False


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Report the block as a pass of that name, unless it raises."""
    start = time.perf_counter()
    if (compilation := _innermost.get()) is not None:
        compilation.name = name
    yield
    seconds = time.perf_counter() - start
    LOGGER.debug(
        "%s took %.6f s", name, seconds, extra={"fxpipe_pass": name, "fxpipe_seconds": seconds}
    )
    if compilation is not None:
        compilation.passes += 1
