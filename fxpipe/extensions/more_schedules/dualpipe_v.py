"""DualPipeV: the two directions of DualPipe folded into one V (DeepSeek, arXiv 2412.19437).

``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Task, U
from fxpipe.schedules.zero_bubble import spell


@schedule("dualpipe-v", placement=vee)
def dualpipe_v(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Stages in a V, two a device; backwards are halved only while the pipe fills and drains.

    Device d holds the stages d and 2p − 1 − d. Made for expert parallelism: a forward and the
    backward right behind it, of another micro-batch, can run as one pass, in which one computes
    while the other communicates. Works for every p and m. p = 2, m = 4, all tasks equally long, so
    that a whole backward is twice as long::

        0: F0 F1 F2 f0 i0 w0 f1 F3 b1  - f2 B0  - b2  - f3  . B1  - b3  - I2 W2 I3 W3 U
        1:  . F0 f0 F1 f1 F2 b0  - f2 B0  - F3 b1  - f3 B1  - b2  - B2  - i3 I3 w3 W3 U

    Bubble: where a forward and a backward are two passes, a device is idle between its first task
    and its last for at most (p − 1)(T_F + T_I − T_W), for m ≥ 2p and T_W ≤ T_I ≤ T_F ≤ T_I + T_W.
    Where they are one pass of T_F + T_B, the whole step takes (p − 1)(T_F + 2 T_B − 3 T_W) longer
    than a device's work, for m ≥ 2p and T_F = T_I ≥ T_W. Kept: 2p + 1 micro-batches of one of a
    device's two stages, for m ≥ 2p.
    """
    upto, behind = device + 1, devices - device - 1
    more = max(microbatches - 2 * devices, 0)
    whole, odd = divmod(upto, 2)
    words = (
        "F0 " * (2 * behind)
        + "F0 F1 " * upto
        + "I1 W F1 " * behind
        + "F0 B1 F1 B0 " * (1 + more + device)
        + "B1 F1 B0 " * behind
        + "B1 B0 " * whole
        + "B1 I0 " * odd
        + "I1 I0 " * whole
        + "W I0 " * behind
        + "W " * upto
    )
    yield from spell(words, stages, microbatches)
    yield from map(U, stages)
