"""1F1B with flush, PipeDream-Flush (Narayanan et al., arXiv 2006.09503).

For: GPipe's time in less memory, however many micro-batches there are. Bubble:
(p − 1)/(m + p − 1). Stash: min(p − s, m) micro-batches on stage s. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("1f1b")
def one_f_one_b(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Warm up, then one backward and one forward in turn, then drain.

    p = 3, m = 4, a backward drawn as long as a forward::

        0: F0 F1 F2  .  . B0 F3 B1  . B2  . B3 U
        1:  . F0 F1  . B0 F2 B1 F3 B2  . B3  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  . U
    """
    ahead = min(devices - device, microbatches)
    for i in range(ahead):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
        if i + ahead < microbatches:
            yield F(i + ahead)
    yield U()
