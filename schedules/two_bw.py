"""PipeDream-2BW: 1F1B without flush, two weight versions (Narayanan et al., arXiv 2006.09503).

For: no bubble in steady state, at the price of gradients one step old: the gradient that updates
version t was computed with version t − 1, on every stage.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s.
Delay: 1, which needs m ≥ p − 1 (the paper asks m ≥ p). With fewer micro-batches give a greater one:
``fxpipe.compile(..., delay=2)``, or take ``1f1b-async``, which has the least that will do.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import Task
from fxpipe.schedules.one_f_one_b_async import one_f_one_b_async


@schedule("2bw", delay=1)
def two_bw(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without flush on two weight versions; a stage updates after a batch's last backward.

    p = 3, m = 3, two steps and the flush, with the micro-batches numbered through and a backward
    drawn as long as a forward; a device updates after B2 and after B5::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)
