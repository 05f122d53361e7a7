"""Report the passes of a compilation as they run, to the logger ``fxpipe``.

Each compilation is an info record, and each pass a debug record. That has the pass's name and
seconds in its text and in its attributes ``fxpipe_pass`` and ``fxpipe_seconds``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOGGER = logging.getLogger("fxpipe")

_passes: ContextVar[list[int] | None] = ContextVar("fxpipe_passes", default=None)
"""How many passes have run in the innermost compilation."""


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Tell the logger how long the block took, if some pass has run in it; most calls run none, as
    everything is compiled already."""
    counted = [0]
    start = time.perf_counter()
    token = _passes.set(counted)
    try:
        yield
    finally:
        _passes.reset(token)
    if counted[0]:
        LOGGER.info("compiled %s in %.3f s", what, time.perf_counter() - start)


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Report the block as a pass of that name, unless it raises."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    LOGGER.debug(
        "%s took %.6f s", name, seconds, extra={"fxpipe_pass": name, "fxpipe_seconds": seconds}
    )
    if (counted := _passes.get()) is not None:
        counted[0] += 1
