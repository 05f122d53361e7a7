"""DualPipeV: DualPipe's two directions folded into one V (DeepSeek, after arXiv 2412.19437).

For: expert parallelism, where a forward and the backward of another micro-batch behind it run as
one pass, each computing while the other communicates.
Bubble of the whole step: (p − 1)(T_F&B + T_B − 3 T_W) for m ≥ 2p and T_F = T_I ≥ T_W, where such
a pass takes T_F&B = T_F + T_B; where they are two passes it is (p − 1)(T_F + T_I − T_W).
Stash: 2p + 1 micro-batches of one of a device's two stages, for m ≥ 2p. Asks nothing of m and p.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Task, U
from fxpipe.schedules.phases import spell


@schedule("dualpipe-v", placement=vee)
def dualpipe_v(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Down the V and up again; backwards are halved only where the pipe fills and drains.

    p = 2, m = 4, a backward twice as long as a forward; small letters on its second stage::

        0: F0 F1 F2 f0 i0 w0 f1 F3 b1  - f2 B0  - b2  - f3  . B1  - b3  - I2 W2 I3 W3 U
        1:  . F0 f0 F1 f1 F2 b0  - f2 B0  - F3 b1  - f3 B1  - b2  - B2  - i3 I3 w3 W3 U
    """
    upto, behind = device + 1, devices - device - 1
    more = max(microbatches - 2 * devices, 0)
    whole, odd = divmod(upto, 2)
    words = (
        "F0 " * (2 * behind)
        + "F0 F1 " * upto
        + "I1 W F1 " * behind
        + "F0 B1 F1 B0 " * (more + upto)
        + "B1 F1 B0 " * behind
        + "B1 B0 " * whole
        + "B1 I0 " * odd
        + "I1 I0 " * whole
        + "W I0 " * behind
        + "W " * upto
    )
    yield from spell(words, stages, microbatches)
    yield from map(U, stages)
