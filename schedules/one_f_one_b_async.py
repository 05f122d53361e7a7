"""1F1B without flush, for any number of micro-batches (after arXiv 1806.03377 and 2006.09503).

For: no bubble at all in steady state; a gradient is computed with weights a few versions old.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s.
Delay: ⌈(p − 1)/m⌉, the smallest with which all stages read the same version.
Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import B, F, Task, U


def staleness(devices: int, microbatches: int) -> int:
    """⌈(p − 1)/m⌉: how many batches lie between the first stage's forward and its backward."""
    return -(-(devices - 1) // microbatches)


@schedule("1f1b-async", delay=staleness)
def one_f_one_b_async(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B from step to step: all forwards of a batch, each with the backward that is due by then.

    Device d is p − 1 − d micro-batches ahead, so its last backwards of a batch come in a later
    window. p = 3, m = 2, three steps and the flush, with the micro-batches numbered through and a
    backward drawn as long as a forward; a device updates after each batch's last backward::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    ahead = devices - 1 - device
    for i in range(microbatches):
        yield F(i)
        batch, j = divmod(i - ahead, microbatches)
        yield B(j, batch=batch)
        if j == microbatches - 1:
            yield U(batch=batch)
