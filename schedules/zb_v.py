"""ZB-V: no bubble in 1F1B's memory (Qi et al., arXiv 2401.10241, section 6, and 2405.15362).

For: stages whose forward, input gradient and weight gradient take about as long as each other.
Bubble: 0 a device for m ≥ 2p − 1 and equal times, between its first task and its last. Stash:
2p micro-batches of one of a device's two stages, in the memory of p whole ones; the same on every
device for m ≥ 2p − 1. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Task, U
from fxpipe.schedules.phases import spell


@schedule("zb-v", placement=vee)
def zb_v(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Down the V and up again: the last stage's first gradient comes as soon as it can.

    p = 2, m = 4, all tasks equally long; small letters on its second stage::

        0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3  . U
        1:  . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3 U
    """
    before, behind = device, devices - device
    more = max(microbatches - 2 * devices + 1, 0)
    words = (
        "F0 " * (2 * behind - 1)
        + "F1 F0 " * before
        + "F1 I1 W " * behind
        + "F0 I0 W F1 I1 W " * (more + before)
        + "I0 W F1 I1 W " * (behind - 1)
        + "I0 I1 " * before
        + "I0 W " * behind
        + "W W " * before
    )
    yield from spell(words, stages, microbatches)
    yield from map(U, stages)
