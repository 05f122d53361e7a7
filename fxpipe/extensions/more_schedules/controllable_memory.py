"""V-Half and V-Min: a half and a third of 1F1B's memory (Qi et al., arXiv 2405.15362).

Both repeat a building block. Two stages a device are placed as a V, and if every task takes one
unit of time, a device has six units of work per micro-batch: F, I and W on each stage. The block
says when the F and I run, for which other devices wait. Repeated every six units it gives a
schedule, whose memory is proportional to the length of the block; the W fill the gaps. While the
pipe fills and drains, tasks leave the order of the blocks where that closes gaps.

Both work for every p and m. The bubble here is the time of a step beyond a device's work; 1F1B's is
6(p − 1) tasks of these half-size stages. ``fxpipe.schedules`` explains the symbols and drawings.
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
"""``(device, devices)`` → the times of micro-batch 0: forward down the V, forward up it, then the
input gradients back down and back up."""


@schedule("v-half", placement=vee)
def v_half(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Stages in a V, two a device: half of 1F1B's memory and half of its bubble.

    A micro-batch takes two units of time a device down the V and one unit up it, forward and back.
    Choose it for longer contexts or larger stages in the same memory. p = 3, m = 3, all tasks
    equally long::

        0: F0 F1 F2  .  . f0 i0 w0 f1 i1 w1 I0 W0  .  . f2 i2 I1 w2 W1  . I2 W2 U
        1:  . F0 F1  . f0  . f1 i0 w0 F2 I0 i1 W0 w1 f2  . I1 i2 W1 w2 I2 W2  . U
        2:  .  . F0 f0 F1 f1  .  . i0 I0 w0 F2 W0 f2 i1 I1 w1 W1 i2 I2 w2 W2  . U

    Bubble: with equal times and m ≥ p > 2, 3p − 7 tasks for even p and 3p − 4 for odd p. It does
    not grow with m where T_F ≤ T_I ≤ T_F + T_W/2. Kept: at most 2⌊(p + 2)/2⌋ micro-batches of one
    of a device's two stages, in the memory of ⌊(p + 2)/2⌋ of both, for every p, m and times.
    """
    limit = 2 * ((devices + 2) // 2)
    yield from repeat(_half, devices, microbatches, limit)[device]
    yield from map(U, stages)


@schedule("v-min", placement=vee)
def v_min(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Stages in a V, two a device: a third of 1F1B's memory and two thirds of its bubble.

    A micro-batch takes one unit of time a device, down and up the V, forward and back. Choose it
    where memory is scarce. p = 3, m = 3, all tasks equally long::

        0: F0 F1  .  .  . f0 i0 f1 w0 F2  . I0 i1 W0 w1 f2 i2 I1 w2 W1  . I2 W2 U
        1:  . F0 F1  . f0  . f1 i0 w0  . I0 F2 W0 i1 f2 w1 I1 i2 W1 w2 I2 W2  . U
        2:  .  . F0 f0 F1 f1  .  . i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2  . U

    Bubble: with equal times and m ≥ p > 2, 4p − 5 tasks, and 4p − 7 where 3 divides p. With
    unequal times it grows with m, as the paper says. Kept: at most 2⌊(p + 4)/3⌋ micro-batches of
    one of a device's two stages, in the memory of ⌊(p + 4)/3⌋ of both, for every p, m and times.
    """
    limit = 2 * ((devices + 4) // 3)
    yield from repeat(_least, devices, microbatches, limit)[device]
    yield from map(U, stages)


def _half(device: int, devices: int) -> tuple[int, int, int, int]:
    """The block of V-Half: two units a device down the V, one unit up it."""
    turn = 3 * devices - 2
    # The gap before the way back keeps the four tasks apart in their period.
    back = turn + 1 + (3 if devices % 2 == 0 else 0)
    return 2 * device, turn - device, back + 2 * device, back + turn - device


def _least(device: int, devices: int) -> tuple[int, int, int, int]:
    """The block of V-Min: one unit a device, down and up."""
    top = 2 * devices - 1
    # The gap before the way back keeps the four tasks apart in their period.
    back = top + 1 + (2 if devices % 3 == 0 else 0)
    return device, top - device, back + device, back + top - device


@lru_cache(maxsize=8)
def repeat(
    block: _Block, devices: int, microbatches: int, limit: int
) -> tuple[tuple[Task, ...], ...]:
    """Repeat a block for all micro-batches and return device → its tasks, without the updates.

    In each unit of time a device runs the next F or I of its blocks, if the inputs are there and an
    F does not exceed the limit; else the W that has waited longest; else nothing. Blocks leave gaps
    where no micro-batch is before or after them, which two rules close: until micro-batch 0 is back
    at the first stage, an F may overtake what has to wait, if the F that it overtakes still fit;
    and after a device's last F, its I run as they arrive.

    Args:
        block: the times of one micro-batch.
        limit: how many micro-batches a device may keep, its two stages together.

    Raises:
        ValueError: the devices wait for one another: the limit is too small for the block.
    """
    orders = [_order(block, device, devices, microbatches) for device in range(devices)]
    waiting: list[deque[Task]] = [deque() for _ in orders]
    rows: list[list[Task]] = [[] for _ in orders]
    forwards = [2 * microbatches] * devices  # that have not run yet
    kept = [0] * devices
    done: set[Task] = set()

    def following(device: int) -> Task | None:
        """The F or I that the device can run now, of those that it has left."""
        room, opening, closing = limit - kept[device], I(0, 0) not in done, not forwards[device]
        for place, task in enumerate(orders[device]):
            turn = place == 0 or (opening if task.kind == "F" else closing)
            if turn and (task.kind == "I" or room > 0) and done >= _needs(task, devices):
                return task
            room -= task.kind == "F"
            if not closing and (not opening or room <= 0):
                break
        return None

    while any(orders) or any(waiting):
        now = []
        for device, order in enumerate(orders):
            if task := following(device):
                order.remove(task)
            elif waiting[device]:
                task = waiting[device].popleft()
            else:
                continue
            if task.kind == "I":
                waiting[device].append(replace(task, kind="W"))
            forwards[device] -= task.kind == "F"
            kept[device] += {"F": 1, "I": 0, "W": -1}[task.kind]
            rows[device].append(task)
            now.append(task)
        if not now:
            raise ValueError(f"{limit} kept micro-batches are too few for a block; raise it")
        done.update(now)
    return tuple(map(tuple, rows))


def _order(block: _Block, device: int, devices: int, microbatches: int) -> list[Task]:
    """Return a device's F and I of all blocks, in the order of their times."""
    down, up = device, 2 * devices - 1 - device
    steps = zip(block(device, devices), (F, F, I, I), (down, up, up, down), strict=True)
    timed = [
        (start + _PERIOD * i, kind(i, stage))
        for start, kind, stage in steps
        for i in range(microbatches)
    ]
    return [task for _, task in sorted(timed, key=lambda pair: pair[0])]


def _needs(task: Task, devices: int) -> set[Task]:
    """The F and I, on any device, that must be done before this F or I."""
    i, stage = task.microbatch, task.stage
    assert i is not None
    assert stage is not None
    if task.kind == "F":
        return {F(i, stage - 1)} if stage > 0 else set()
    last = stage == 2 * devices - 1
    return {F(i, stage)} if last else {F(i, stage), I(i, stage + 1)}
