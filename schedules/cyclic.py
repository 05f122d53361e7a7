"""Cyclic data parallelism: micro-batches one behind another (Fournier & Oyallon, arXiv 2403.08837).

For: the work of N replicas on N devices. N micro-batches take the place of N replicas; each begins
two tasks behind the one before it, as if they went round a circle, and none ever stops.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s at any moment, for
T_F = T_B, so p(p + 1)/2 of a stage, (p + 1)/2 models' worth, over all devices; N replicas hold N
models' worth at the end of their forwards.
Delay: ``cdp-v1``: 1, 2BW's rule, so it asks m ≥ p − 1. ``cdp-v2``: 1 for micro-batch i on stage s
while i + s < p − 1, else 0, with the paper's m = p; with any m the least that will do,
⌈(p − 1 − s − i)/m⌉, so it asks nothing of m and p. Versions: 2; with ``cdp-v2`` the last stage
reads one.

Read: the aims in the paper's abstract, and which micro-batch takes which gradient on which stage in
the authors' program, where rank i applies at once what stages s ≥ N − 1 − i have, and a step later
what the others have. Derived: that one pipeline of N devices has room for all N micro-batches, with
the tasks of 1F1B without a flush in the same order; the stash; and ``cdp-v2`` for m ≠ p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import Task
from fxpipe.schedules.one_f_one_b_async import one_f_one_b_async


def newest(microbatch: int, stage: int, devices: int, microbatches: int) -> int:
    """How many updates the stage still lacks when the forward gets there: ⌈(p − 1 − s − i)/m⌉."""
    return -((microbatch + stage + 1 - devices) // microbatches)


@schedule("cdp-v1", delay=1)
def cdp_v1(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """All micro-batches read the version before the newest.

    p = 3, m = 3, two steps and the flush, with the micro-batches numbered through and a backward
    drawn as long as a forward; a device updates after B2 and after B5::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)


@schedule("cdp-v2", delay=newest)
def cdp_v2(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """A micro-batch reads the newest version that a stage has when its forward gets there.

    p = 3, m = 3 as above. F3 on device 0 and F3 on device 1 come before the update behind B2, and
    F4 on device 0; all others behind it::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)
