"""Forwards alone, in order: what a pipe runs when it is called without gradients.

Bubble: (p − 1)/(m + p − 1). Stash: nothing. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import F, Task


@schedule("inference")
def inference(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Fill and go on: nothing is kept for a backward.

    p = 2, m = 3::

        0: F0 F1 F2  .
        1:  . F0 F1 F2
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
