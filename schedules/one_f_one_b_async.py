"""1F1B without flush: PipeDream, PipeDream-2BW, and the same for any number of micro-batches.

The order of the tasks is one, with no bubble at all in steady state; the rules of versions differ.
Bubble: (p − 1)/(m T + p − 1) over T steps. Stash: p − s micro-batches on stage s.

``1f1b-async`` (after arXiv 1806.03377 and 2006.09503), for: any number of micro-batches. Delay:
⌈(p − 1)/m⌉, the smallest with which all stages read the same version. Asks nothing of m and p.

``2bw`` (Narayanan et al., arXiv 2006.09503), for: gradients one step old and no older: the gradient
that updates version t was computed with version t − 1, on every stage. Delay: 1, which needs
m ≥ p − 1 (the paper asks m ≥ p). With fewer micro-batches give a greater one:
``fxpipe.compile(..., delay=2)``, or take ``1f1b-async``, which has the least that will do.

``pipedream`` (Harlap et al., arXiv 1806.03377), for: the asynchronous pipeline that the others are
measured by, with an update a micro-batch. The paper's is m = 1; with m > 1 a stage adds up the
gradients of m micro-batches before it updates. Asks nothing of m and p.
Delay: ⌈(p − 1 − s)/m⌉ on stage s, the paper's weight stashing: a micro-batch reads the newest
version that each stage has, and reads it again in its backward. ``pipedream-vertical``:
⌈(p − 1)/m⌉, p − 1 for the paper's m = 1: its vertical sync, where a micro-batch must meet the same
version on all stages.
Versions: with ``pipedream`` ⌈(p − 1 − s)/m⌉ + 1 on stage s are read. While batches are in flight, a
stage that is ahead of the slowest also keeps what it would go back to after a failure: up to
⌈(p − 1)/m⌉ + 2 versions in all, and the optimizer's states from before these updates.
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
