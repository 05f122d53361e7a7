"""V-Min: a third of 1F1B's memory and two thirds of its bubble (Qi et al., arXiv 2405.15362).

For: where memory is what lacks. Bubble with equal times and m ≥ p: 4p − 5 tasks, two more where 3
divides p, of 1F1B's 6(p − 1). With unequal times it grows with m, as its paper says.
Stash: at most 2⌊(p + 4)/3⌋ micro-batches of one of a device's two stages, in the memory of
⌊(p + 4)/3⌋ whole ones, whatever the times. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Task, U
from fxpipe.schedules.blocks import repeat


@schedule("v-min", placement=vee)
def v_min(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Building blocks that take one unit a device, all the way down and up the V, forward and back.

    p = 3, m = 3, all tasks equally long; small letters on its second stage::

        0: F0  .  .  .  . f0 F1 i0 w0  .  . f1 F2 I0 i1 W0 w1 f2  . I1 i2 W1 w2  .  . I2 W2 U
        1:  . F0  .  . f0  .  . F1 i0 w0 f1  . I0 F2 W0 i1 f2 w1 I1 W1  . i2 w2  . I2 W2  . U
        2:  .  . F0 f0  .  .  .  . F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1  .  . i2 I2 w2 W2  . U
    """
    limit = 2 * ((devices + 4) // 3)
    yield from repeat(_block, devices, microbatches, limit)[device]
    yield from map(U, stages)


def _block(device: int, devices: int) -> tuple[int, int, int, int]:
    """One unit a device all the way."""
    top = 2 * devices - 1
    # The gap before the way back keeps the four tasks apart in their period.
    back = top + 1 + (2 if devices % 3 == 0 else 0)
    return device, top - device, back + device, back + top - device
