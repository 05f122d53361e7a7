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

Building blocks: if every task takes one unit of time, a device with a V-shaped placement has six
units of work per micro-batch. A block has the times of four of them, those that other devices wait
for. Repeating it every six units gives a schedule whose memory is proportional to the block's
length. The weight gradients fill the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import F, I, Task, U

_PERIOD = 6

_Block = Callable[[int, int], tuple[int, int, int, int]]
"""``(device, devices)`` → when micro-batch 0 goes forward down the V, forward up, back down and
back up."""


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


@lru_cache(maxsize=8)
def repeat(
    block: _Block, devices: int, microbatches: int, limit: int
) -> tuple[tuple[Task, ...], ...]:
    """Device → its forwards and gradients, with the blocks moved together.

    In each unit of time, each device runs the next task of its blocks if its inputs are there and
    its stash is below the limit, else the weight gradient that has waited longest, else nothing.

    Args:
        block: the times of one micro-batch.
        limit: how many micro-batches a device may keep, its two stages together.

    Raises:
        ValueError: the devices wait for one another, for the limit or the block is too short.
    """
    orders = [deque(_order(block, device, devices, microbatches)) for device in range(devices)]
    waiting: list[deque[Task]] = [deque() for _ in orders]
    rows: list[list[Task]] = [[] for _ in orders]
    kept = [0] * devices
    done: set[Task] = set()
    while any(orders) or any(waiting):
        now = []
        for device, order in enumerate(orders):
            blocked = kept[device] == limit and order and order[0].kind == "F"
            if order and not blocked and done >= _needs(order[0], devices):
                task = order.popleft()
            elif waiting[device]:
                task = waiting[device].popleft()
            else:
                continue
            if task.kind == "I":
                waiting[device].append(replace(task, kind="W"))
            kept[device] += {"F": 1, "I": 0, "W": -1}[task.kind]
            rows[device].append(task)
            now.append(task)
        if not now:
            raise ValueError(f"a stash of {limit} is too little for the block; raise the limit")
        done.update(now)
    return tuple(map(tuple, rows))


def _order(block: _Block, device: int, devices: int, microbatches: int) -> list[Task]:
    """A device's part of the blocks, by time."""
    down, up = device, 2 * devices - 1 - device
    steps = zip(block(device, devices), (F, F, I, I), (down, up, up, down), strict=True)
    timed = [
        (start + _PERIOD * i, kind(i, stage))
        for start, kind, stage in steps
        for i in range(microbatches)
    ]
    return [task for _, task in sorted(timed, key=lambda pair: pair[0])]


def _needs(task: Task, devices: int) -> set[Task]:
    """The tasks that must be done before this one, on any device: its forward, and the same
    micro-batch's task on the neighbouring stage."""
    i, stage = task.microbatch, task.stage
    assert i is not None
    assert stage is not None
    if task.kind == "F":
        return {F(i, stage - 1)} if stage > 0 else set()
    last = stage == 2 * devices - 1
    return {F(i, stage)} if last else {F(i, stage), I(i, stage + 1)}
