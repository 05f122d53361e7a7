"""Takes the times of the instructions that a pipe runs, by one clock over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe.engine import Engine


@contextmanager
def timed(engine: Engine) -> Iterator[list[list[int]]]:
    """Take the times of the instructions in the block. Yields a list that is filled at its end:
    device → start and end of each instruction, in nanoseconds of the first rank's clock."""
    engine.flush()
    times: list[list[int]] = []
    engine.times = [[] for _ in engine._options.devices]
    try:
        yield times
        engine.flush()
        marks = engine.times
    finally:
        engine.times = []
    local = [engine.backend.nanoseconds(device, of) for device, of in enumerate(marks)]
    times += engine.group.timed(local)
