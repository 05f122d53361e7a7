"""Naive, GPipe, looped breadth-first, inference: loops over stages and micro-batches, no more.

``naive``, what a model split by hand does, for: the baseline that every pipeline is compared with,
and for debugging. Bubble: (p − 1)/p. Stash: 1 micro-batch on every stage.

``gpipe`` (Huang et al., arXiv 1811.06965), for: simplicity, and few micro-batches. Bubble:
(p − 1)/(m + p − 1).

``looped-bfs`` (arXiv 2211.05953), GPipe on devices with several stages, for: parameters that are
sharded or reduced over further devices: each stage's come up only twice a step, and their
communication overlaps with the other stages' compute.
Bubble: (p − 1)/(v m + p − 1) for v stages a device and m ≥ p. ``placed(round_robin(4))`` has v = 4.

Stash of both: m micro-batches on every stage.

``inference``, GPipe's forwards alone, is what a pipe runs when it is called without gradients.
Bubble: (p − 1)/(m + p − 1). Stash: nothing.

All four ask nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import round_robin, schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("naive")
def naive(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """A micro-batch goes forward and all the way back before the next one starts.

    p = 3, m = 2, a backward drawn as long as a forward::

        0: F0  .  .  .  . B0 F1  .  .  .  . B1 U
        1:  . F0  .  . B0  .  . F1  .  . B1  . U
        2:  .  . F0 B0  .  .  .  . F1 B1  .  . U
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

    p = 3, m = 3, a backward drawn as long as a forward::

        0: F0 F1 F2  .  .  .  . B0 B1 B2 U
        1:  . F0 F1 F2  .  . B0 B1 B2  . U
        2:  .  . F0 F1 F2 B0 B1 B2  .  . U

    A device that holds several stages runs them breadth first: all micro-batches of one, then
    all of the next.
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
    """A device takes all micro-batches through one stage, then through its next; back the same way.

    p = 2, m = 3, a backward drawn as long as a forward; small letters on its second stage::

        0: F0 F1 F2 f0 f1 f2  .  . b0 b1 b2 B0 B1 B2 U
        1:  . F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2  . U
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
    """Fill and go on: nothing is kept for a backward.

    p = 2, m = 3::

        0: F0 F1 F2  .
        1:  . F0 F1 F2
    """
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
