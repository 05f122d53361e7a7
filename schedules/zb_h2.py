"""ZB-H2: no bubble, for nearly twice the memory (Qi et al., arXiv 2401.10241).

For: where memory is left. Forwards fill the wait for the first gradient, weight gradients the end;
every device is busy from its first task to its last, and they begin and end one after another.
Bubble: (p − 1)(T_F + T_I − 2 T_W) a device, for m ≥ 2p − 1, T_W ≤ T_F and 2 T_W ≤ T_F + T_I: 0
with equal times. Stash: min(2p − 1, m) micro-batches on every stage. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import F, I, Task, U, W


@schedule("zb-h2")
def zb_h2(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Twice ZB-H1's head start, and twice its delay of the weight gradients.

    p = 3, m = 6, all tasks equally long::

        0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  . U
        1:  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  . U
        2:  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5 U
    """
    ahead = min(2 * (devices - device) - 1, microbatches)
    behind = min(2 * device, microbatches)
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
