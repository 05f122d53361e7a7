"""Whether a module's forward runs for the second time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


def is_recomputing() -> bool:
    """Whether the forward that calls this is a recomputation, for modules that are called as they
    are: one that counts its calls should not count this one."""
    return bool(getattr(_here, "active", False))


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, on this thread, ``is_recomputing`` is true."""
    _here.active = True
    try:
        yield
    finally:
        _here.active = False
