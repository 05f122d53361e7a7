"""What operations take in tests, so that no measurement of a machine decides where models are cut.

Cuts follow measured times, and other machines measure otherwise. In tests, and in the ranks that
they start, an operation takes as long as any other, unless its stopwatch was given a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from fxpipe.passes.partition.measure import Stopwatch

_SECONDS = 1e-5


@contextmanager
def equal_times() -> Iterator[None]:
    """Inside, all operations on the host take equal times."""
    seconds = Stopwatch.seconds

    def equal(watch: Stopwatch, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        if watch.device is None and watch.clock is None:
            return [_SECONDS] * len(spans)
        return seconds(watch, spans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopwatch, "seconds", equal)
        yield


__all__ = ["equal_times"]
