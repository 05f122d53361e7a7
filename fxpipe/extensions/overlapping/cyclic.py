"""Cyclic data parallelism as a pipeline (Fournier & Oyallon, arXiv 2403.08837): CDP-v1 and CDP-v2.

N micro-batches on N devices do the work of N replicas. Each micro-batch begins two tasks behind the
one before it, and none ever stops. The tasks are those of ``1f1b-async``, in the same order; the
two versions differ in the weights that a micro-batch reads.

Figures of both, for every p and m that they take. Bubble over T steps: (p − 1)/(m T + p − 1).
Stash: p − s micro-batches on stage s; with T_F = T_B at any moment. Over all devices that is
p(p + 1)/2 micro-batches of a stage, as many as (p + 1)/2 whole models keep; p replicas keep p at
the end of their forwards. Weight versions: at most 2 on a stage, for m ≥ p − 1.

From the paper: the aims, in its abstract. From the authors' program: which micro-batch reads which
version on which stage. Derived here: that one pipeline of N devices holds all N micro-batches, the
stash, and ``cdp-v2`` for m ≠ p. ``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.extensions.overlapping.one_f_one_b_async import one_f_one_b_async
from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import Task


def newest(devices: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Stage → micro-batch → how many updates the stage still lacks when the forward reaches it:
    ⌈(p − 1 − s − i)/m⌉."""
    return tuple(
        tuple(-((i + stage + 1 - devices) // microbatches) for i in range(microbatches))
        for stage in range(devices)
    )


@schedule("cdp-v1", delay=1)
def cdp_v1(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without a flush; all micro-batches read weights one step old, as in 2BW.

    Delay: 1, on every stage, which needs m ≥ p − 1; the paper's m is p. p = 3, m = 3, two steps and
    the flush, micro-batches numbered through the steps, a backward drawn as long as a forward. A
    device updates after B2 and after B5::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)


@schedule("cdp-v2", delay=newest)
def cdp_v2(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B without a flush; each forward reads the newest weights that its stage has by then.

    Delay of micro-batch i on stage s: with the paper's m = p, 1 where i + s < p − 1, else 0. With
    any other m it is ⌈(p − 1 − s − i)/m⌉, the least that works, so every p and m will do. The last
    stage keeps one version. p = 3, m = 3, two steps and the flush, drawn as ``cdp-v1``. F3 and F4
    on device 0 and F3 on device 1 run before the update that follows B2, the second step's other
    forwards after it::

        0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5 U
        1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  . U
    """
    yield from one_f_one_b_async.tasks(device, devices, microbatches)
