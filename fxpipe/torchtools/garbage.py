"""Switch off Python's cyclic garbage collector while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, the cyclic garbage collector is off; also a decorator.

    For code that makes many objects without reference cycles, such as instructions and buffers. The
    collector visits all of them again and again, which took half the time of lowering and
    verifying, and a growing share for larger programs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
