"""What compiling is doing, told while it happens: to the logger ``fxpipe``, and to a listener.

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
