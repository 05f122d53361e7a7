"""ZB-H1: 1F1B whose weight gradients wait until a device would idle (Qi et al., arXiv 2401.10241).

For: a third of 1F1B's bubble in the memory of its first stage.
Bubble: (p − 1)(T_F + T_I − T_W) a device, for m ≥ p and T_W ≤ T_F; with equal times that is a
fraction (p − 1)/(3m + p − 1). Stash: min(p, m) micro-batches on every stage, where one counts
until its weight gradient is made. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import F, I, Task, U, W


@schedule("zb-h1")
def zb_h1(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B of input gradients; on device d the weight gradients come d micro-batches behind.

    p = 3, m = 5, all tasks equally long::

        0: F0 F1 F2  .  . I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4 U
        1:  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4 U
        2:  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4 U
    """
    ahead = min(devices - device, microbatches)
    behind = min(device, microbatches)
    for i in range(ahead):
        yield F(i)
    for i in range(microbatches):
        yield I(i)
        if i >= behind:
            yield W(i - behind)
        if i + ahead < microbatches:
            yield F(i + ahead)
    for i in range(microbatches - behind, microbatches):
        yield W(i)
    yield U()
