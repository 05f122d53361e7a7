"""V-Half and V-Min: a half and a third of 1F1B's memory (Qi et al., arXiv 2405.15362).

``v-half``, for: longer contexts or larger stages in the same memory.
Bubble with equal times and m ≥ p: 3(p − 1) tasks for even p, 3p − 4 for odd p > 1, of 1F1B's
6(p − 1): half of it. It does not grow with m for T_F ≤ T_I ≤ T_F + T_W / 2.
Stash: at most 2⌊(p + 2)/2⌋ micro-batches of one of a device's two stages, in the memory of
⌊(p + 2)/2⌋ whole ones, whatever the times.

``v-min``, for: where memory is what lacks. Bubble with equal times and m ≥ p: 4p − 5 tasks, two
more where 3 divides p: two thirds of 1F1B's. With unequal times it grows with m, as the paper says.
Stash: at most 2⌊(p + 4)/3⌋ micro-batches of one of a device's two stages, in the memory of
⌊(p + 4)/3⌋ whole ones, whatever the times.

Both ask nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Task, U
from fxpipe.schedules.blocks import repeat


@schedule("v-half", placement=vee)
def v_half(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Building blocks that take two units a device down the V and one unit up, forward and back.

    p = 3, m = 3, all tasks equally long; small letters on its second stage::

        0: F0 F1  .  .  . f0 i0 F2 w0 f1 i1 w1 I0 W0  . f2 i2 I1 w2 W1  . I2 W2 U
        1:  . F0  .  . f0 F1  . i0 f1 w0 F2 I0 i1 W0 f2 w1 I1 i2 W1 w2 I2 W2  . U
        2:  .  . F0 f0  .  . F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 W1 i2 I2 w2 W2  . U
    """
    limit = 2 * ((devices + 2) // 2)
    yield from repeat(_half, devices, microbatches, limit)[device]
    yield from map(U, stages)


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
    yield from repeat(_least, devices, microbatches, limit)[device]
    yield from map(U, stages)


def _half(device: int, devices: int) -> tuple[int, int, int, int]:
    """Two units a device on the way down the V, one on the way up, forward and back."""
    turn = 3 * devices - 2
    # The gap before the way back keeps the four tasks apart in their period.
    back = turn + 1 + (3 if devices % 2 == 0 else 0)
    return 2 * device, turn - device, back + 2 * device, back + turn - device


def _least(device: int, devices: int) -> tuple[int, int, int, int]:
    """One unit a device all the way."""
    top = 2 * devices - 1
    # The gap before the way back keeps the four tasks apart in their period.
    back = top + 1 + (2 if devices % 3 == 0 else 0)
    return device, top - device, back + device, back + top - device
