"""PipeDream: 1F1B without flush, an update a micro-batch (Harlap et al., arXiv 1806.03377).

For: the asynchronous pipeline that the others are measured by. The paper's is m = 1; with m > 1
a stage adds up the gradients of m micro-batches before it updates.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s. Asks nothing of m
and p.
Delay: ``pipedream``: ⌈(p − 1 − s)/m⌉ on stage s, the paper's weight stashing: a micro-batch reads
the newest version that each stage has, and reads it again in its backward. ``pipedream-vertical``:
⌈(p − 1)/m⌉, p − 1 for the paper's m = 1: its vertical sync, where a micro-batch must meet the same
version on all stages.
Versions: with ``pipedream`` ⌈(p − 1 − s)/m⌉ + 1 on stage s are read. While batches are in flight, a
stage that is ahead of the slowest also keeps what it would go back to after a failure: up to
⌈(p − 1)/m⌉ + 2 versions in all, and the optimizer's states from before these updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import Task
from fxpipe.schedules.one_f_one_b_async import one_f_one_b_async, staleness


def _delay(devices: int, microbatches: int) -> tuple[int, ...]:
    """Stage → how many updates its newest version lacks: those of the stages from it on."""
    return tuple(staleness(devices - stage, microbatches) for stage in range(devices))


@schedule("pipedream", delay=_delay)
def pipedream(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without flush; each stage computes with the newest weights that it has.

    p = 3, m = 1, six steps and the flush, with the micro-batches numbered through and a backward
    drawn as long as a forward; a device updates after every backward::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)


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
