"""Forwards alone, in order: what a pipe runs when it is called without gradients."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.schedule import F, Task, schedule


@schedule("inference")
def inference(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Fill and go on: nothing is kept for a backward.

    p = 2, m = 3::

        0: F0 F1 F2  .
        1:  . F0 F1 F2
    """
    for i in range(microbatches):
        yield F(i)
