"""1F1B without a flush: PipeDream, PipeDream-2BW, and the same for any number of micro-batches.

Batches follow each other without a pause, so there is no bubble in steady state. All run the same
tasks in the same order and differ in the delay: by how many updates the weights that a batch reads
are older than the newest. A backward always reads the version that its forward read.

Figures of all, for every p and m that they take. Bubble over T steps: (p − 1)/(m T + p − 1). Kept:
p − s micro-batches on stage s. ``fxpipe.schedules`` explains the symbols and drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import B, F, Task, U


def staleness(devices: int, microbatches: int) -> int:
    """How many batches the first stage's forwards are ahead of its backwards: ⌈(p − 1)/m⌉."""
    return -(-(devices - 1) // microbatches)


@schedule("1f1b-async", delay=staleness)
def one_f_one_b_async(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without a flush, with the smallest delay at which all stages read the same version.

    After arXiv 1806.03377 and 2006.09503; with m = 1 it is PipeDream with vertical sync. Delay:
    ⌈(p − 1)/m⌉ on every stage, for every p and m. Weight versions: at most ⌈(p − 1)/m⌉ + 1, on the
    first stage. The forwards of device d are p − 1 − d micro-batches ahead of its backwards, so its
    last backwards of a batch run in a later step. p = 3, m = 2, three steps and the flush,
    micro-batches numbered through the steps, a backward drawn as long as a forward. A device
    updates after each batch's last backward::

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
    """1F1B without a flush and with a delay of 1: each gradient is one step old, on every stage.

    PipeDream-2BW (Narayanan et al., arXiv 2006.09503). The gradient that updates version t was
    computed with version t − 1, so two versions are kept. Needs m ≥ p − 1; the paper has m ≥ p.
    With fewer micro-batches set a greater delay, ``schedule=two_bw.delayed(2)``, or choose
    ``1f1b-async``. p = 3, m = 3, two steps and the flush, micro-batches numbered through the steps,
    a backward drawn as long as a forward. A device updates after B2 and after B5::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)


def _delay(devices: int, microbatches: int) -> tuple[int, ...]:
    """Stage s → how many batches its forwards are ahead of its backwards: ⌈(p − 1 − s)/m⌉."""
    return tuple(staleness(devices - stage, microbatches) for stage in range(devices))


@schedule("pipedream", delay=_delay)
def pipedream(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without a flush; each stage reads the newest weights it has when a batch arrives.

    PipeDream with weight stashing (Harlap et al., arXiv 1806.03377). The paper updates after every
    micro-batch, m = 1; with m > 1 a stage sums the gradients of m micro-batches first. Delay:
    ⌈(p − 1 − s)/m⌉ on stage s, for every p and m.

    Weight versions: stage s reads ⌈(p − 1 − s)/m⌉ + 1. While batches are in flight, a stage ahead
    of the slowest also keeps the version to go back to after a failure: up to ⌈(p − 1)/m⌉ + 2
    versions in all, and the optimizer's states from before these updates.

    p = 3, m = 1, six steps and the flush, micro-batches numbered through the steps, a backward
    drawn as long as a forward. A device updates after every backward::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)
