"""GPipe: fill with all forwards, then drain all backwards (Huang et al., arXiv 1811.06965).

For: simplicity, and few micro-batches. Bubble: (p − 1)/(m + p − 1). Stash: m micro-batches on
every stage. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("gpipe")
def gpipe(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Every device runs all its forwards, then all its backwards.

    p = 3, m = 3, a backward drawn as long as a forward::

        0: F0 F1 F2  .  .  .  . B0 B1 B2 U
        1:  . F0 F1 F2  .  . B0 B1 B2  . U
        2:  .  . F0 F1 F2 B0 B1 B2  .  . U

    A device that holds several stages runs them breadth first: all micro-batches of one, then
    all of the next.
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            yield B(i, stage)
    for stage in stages:
        yield U(stage)
