"""PipeDream with vertical sync (Harlap et al., arXiv 1806.03377).

For: PipeDream where a micro-batch must meet the same version on all stages.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s.
Delay: ⌈(p − 1)/m⌉, p − 1 for the paper's m = 1. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import Task
from fxpipe.schedules.one_f_one_b_async import one_f_one_b_async, staleness


@schedule("pipedream-vertical", delay=staleness)
def pipedream_vertical(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without flush; all stages compute with the version that the first one had.

    p = 3, m = 1, six steps and the flush, with the micro-batches numbered through and a backward
    drawn as long as a forward; a device updates after every backward::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)
