"""Naive model parallelism: one micro-batch at a time, what a model split by hand does.

For: the baseline that every pipeline is compared with, and for debugging.
Bubble: (p − 1)/p. Stash: 1 micro-batch on every stage. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("naive")
def naive(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """A micro-batch goes forward and all the way back before the next one starts.

    p = 3, m = 2, a backward drawn as long as a forward::

        0: F0  .  .  .  . B0 F1  .  .  .  . B1 U
        1:  . F0  .  . B0  .  . F1  .  . B1  . U
        2:  .  . F0 B0  .  .  .  . F1 B1  .  . U
    """
    for i in range(microbatches):
        for stage in stages:
            yield F(i, stage)
        for stage in reversed(stages):
            yield B(i, stage)
    for stage in stages:
        yield U(stage)
