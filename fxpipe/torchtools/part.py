"""State dicts of models of which this process has only a part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Allowed(threading.local):
    here = False


allowed = _Allowed()
"""Whether this thread may take the state dict of a model of which this process has a part."""


@contextmanager
def state_in_part() -> Iterator[None]:
    """Inside, this thread may take such state dicts."""
    before, allowed.here = allowed.here, True
    try:
        yield
    finally:
        allowed.here = before
