"""DualPipe (DeepSeek, arXiv 2412.19437), whose opposite directions have a copy of each stage.

``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.extensions.copies.chimera import both_ways
from fxpipe.extensions.more_schedules.dualpipe_v import words
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.task import Pair, Task, U
from fxpipe.schedules.zero_bubble import spell


def _dualpipe(device: int, devices: int, microbatches: int) -> Iterator[Task | Pair]:
    """Two pipelines in opposite directions, whose forwards and backwards run together as pairs.

    DualPipe (DeepSeek, arXiv 2412.19437), in the order of its authors' program. Even micro-batches
    go down the devices, odd ones up; device d holds stage d and a copy of stage p − 1 − d. Works
    for every m and even p. p = 2, m = 6, all tasks equally long; small letters on the copy::

        0: F0 f1 F2 b1--- f3&B0--- F4&b3--- f5&B2--- b5--- I4 W4 U
        1: f1 F0 f3 B0--- F2&b1--- f5&B2--- F4&b3--- B4--- i5 w5 U

    Bubble: a step takes (p/2 − 1)(T_F&B + T_B − 3 T_W) longer than a device's work, for even
    m ≥ 2p, T_F&B = T_F + T_B and T_F = T_I ≥ T_W; at most that with shorter pairs. Stash: p + 1
    micro-batches of a stage on every device, its two stages together, for m ≥ 2p.
    """
    if devices % 2:
        raise ValueError(f"devices is {devices}; DualPipe needs an even number of them")
    up = device >= devices // 2
    stages = tuple(sorted((device, devices - 1 - device)))
    more = max((microbatches + 1) // 2 - devices, 0)
    row = words(stages[0], devices // 2, more, "&")
    yield from spell(row, stages, microbatches, (int(up), int(not up)), step=2)
    yield U(device)


dualpipe = Recipe("dualpipe", _dualpipe, placement=both_ways)
"""Two pipelines in opposite directions whose forwards and backwards run together; even p only."""
