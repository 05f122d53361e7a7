"""Tell a module whether its forward is run again for a recomputation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


def is_recomputing() -> bool:
    """Whether the running forward is a recomputation.

    For leaf modules: one that counts its calls should not count a recomputation.
    """
    return bool(getattr(_here, "active", False))


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, on this thread, ``is_recomputing`` is true."""
    _here.active = True
    try:
        yield
    finally:
        _here.active = False
