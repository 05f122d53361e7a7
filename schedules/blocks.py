"""Building blocks: a V-shaped schedule from the times of one micro-batch (arXiv 2405.15362).

If every task takes one unit of time, a device with a V-shaped placement has six units of work per
micro-batch. A block has the times of four of them, those that other devices wait for. Repeating it
every six units gives a schedule whose memory is proportional to the block's length. The weight
gradients fill the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from fxpipe.ir.task import F, I, Task

PERIOD = 6

Block = Callable[[int, int], tuple[int, int, int, int]]
"""``(device, devices)`` → when micro-batch 0 goes forward down the V, forward up, back down and
back up."""


@lru_cache(maxsize=8)
def repeat(
    block: Block, devices: int, microbatches: int, limit: int
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


def _order(block: Block, device: int, devices: int, microbatches: int) -> list[Task]:
    """A device's part of the blocks, by time."""
    down, up = device, 2 * devices - 1 - device
    steps = zip(block(device, devices), (F, F, I, I), (down, up, up, down), strict=True)
    timed = [
        (start + PERIOD * i, kind(i, stage))
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
