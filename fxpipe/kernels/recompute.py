"""Whether a forward is a recomputation, for modules that ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


def is_recomputing() -> bool:
    """Whether the running forward is a recomputation.

    For modules that are called as they are and count their calls, but no recomputations.
    """
    return bool(getattr(_here, "active", False))


@contextmanager
def recomputing() -> Iterator[None]:
    """Make ``is_recomputing`` true inside the block, on this thread."""
    _here.active = True
    try:
        yield
    finally:
        _here.active = False
