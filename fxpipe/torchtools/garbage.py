"""Python's cyclic garbage collector, out of the way while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Make objects without a search for cycles among them; also a decorator.

    For code that makes many that are in none, such as instructions and buffers: walking all of
    them over and over took half the time of lowering and verifying, and more the more there were.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
