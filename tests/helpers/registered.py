"""What a test registers is gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe import extend
from fxpipe.ir.schedule import Schedule


@contextmanager
def registry_restored() -> Iterator[None]:
    """Restore the names of all doors, and the views of schedules, at the end."""
    doors = {door: dict(known) for door, known in extend._REGISTRY.items()}
    attributes = set(vars(Schedule))
    try:
        yield
    finally:
        extend._REGISTRY.update(doors)
        for name in set(vars(Schedule)) - attributes:
            delattr(Schedule, name)
