"""Plain loops over stages and micro-batches: naive, GPipe, looped breadth-first and inference.

All four work for every p and m. ``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import round_robin, schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("naive")
def naive(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Each micro-batch goes forward and all the way back before the next one starts.

    This is what a model split by hand does: the baseline for every pipeline, and good for
    debugging. p = 3, m = 2, a backward drawn as long as a forward::

        0: F0  .  .  .  . B0 F1  .  .  .  . B1 U
        1:  . F0  .  . B0  .  . F1  .  . B1  . U
        2:  .  . F0 B0  .  .  .  . F1 B1  .  . U

    Bubble: (p − 1)/p. Kept: 1 micro-batch on every stage. Both hold for every p and m.
    """
    for i in range(microbatches):
        for stage in stages:
            yield F(i, stage)
        for stage in reversed(stages):
            yield B(i, stage)
    for stage in stages:
        yield U(stage)


@schedule("gpipe")
def gpipe(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Every device runs all its forwards, then all its backwards.

    GPipe (Huang et al., arXiv 1811.06965). Choose it for its simplicity, and for few micro-batches.
    p = 3, m = 3, a backward drawn as long as a forward::

        0: F0 F1 F2  .  .  .  . B0 B1 B2 U
        1:  . F0 F1 F2  .  . B0 B1 B2  . U
        2:  .  . F0 F1 F2 B0 B1 B2  .  . U

    A device that holds several stages runs all micro-batches of one, then all of the next.

    Bubble: (p − 1)/(m + p − 1). Kept: m micro-batches on every stage. Both hold for every p and m.
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            yield B(i, stage)
    for stage in stages:
        yield U(stage)


@schedule("looped-bfs", placement=round_robin(2))
def looped_bfs(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """GPipe with several stages a device: all micro-batches of one stage, then all of the next.

    Looped breadth-first (arXiv 2211.05953). Choose it where parameters are sharded, or gradients
    summed, over replicas: a stage needs its parameters only twice a step, and their communication
    overlaps with the compute of the device's other stages. p = 2, m = 3, v = 2, a backward drawn
    as long as a forward::

        0: F0 F1 F2 f0 f1 f2  .  . b0 b1 b2 B0 B1 B2 U
        1:  . F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2  . U

    ``looped_bfs.placed(round_robin(4))`` has v = 4.

    Bubble: (p − 1)/(v m + p − 1), for m ≥ p. Kept: m micro-batches on every stage, for every p
    and m.
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            yield B(i, stage)
        yield U(stage)


@schedule("inference")
def inference(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """The forwards of GPipe alone; nothing is kept for a backward.

    A pipe runs it when it is called without gradients. p = 2, m = 3::

        0: F0 F1 F2  .
        1:  . F0 F1 F2

    Bubble: (p − 1)/(m + p − 1), for every p and m. Kept: none.
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
