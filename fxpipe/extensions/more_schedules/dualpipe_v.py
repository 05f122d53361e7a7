"""DualPipeV: the two directions of DualPipe folded into one V (DeepSeek, arXiv 2412.19437).

``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import Pair, Task, U
from fxpipe.schedules.zero_bubble import spell


@schedule("dualpipe-v", placement=vee)
def dualpipe_v(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task | Pair]:
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
    than a device's work, for m ≥ 2p and T_F = T_I ≥ T_W. Stash: 2p + 1 micro-batches of one of a
    device's two stages, for m ≥ 2p.
    """
    more = max(microbatches - 2 * devices, 0)
    yield from spell(words(device, devices, more, " "), stages, microbatches)
    yield from map(U, stages)


def words(device: int, devices: int, more: int, both: str) -> str:
    """A device's row; ``both`` is between a forward and a backward that can run together."""
    upto, behind = device + 1, devices - device - 1
    whole, odd = divmod(upto, 2)
    first = both if behind else " "
    return (
        "F0 " * (2 * behind)
        + "F0 F1 " * upto
        + "I1 W F1 " * behind
        + f"F0{first}B1 F1{both}B0 "
        + f"F0{both}B1 F1{both}B0 " * (more + device)
        + f"B1 F1{both}B0 " * behind
        + "B1 B0 " * whole
        + "B1 I0 " * odd
        + "I1 I0 " * whole
        + "W I0 " * behind
        + "W " * upto
    )
