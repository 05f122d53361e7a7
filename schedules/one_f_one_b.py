"""1F1B with flush, and interleaved: one forward and one backward in turn.

``1f1b``, PipeDream-Flush (Narayanan et al., arXiv 2006.09503), for: GPipe's time in less memory,
however many micro-batches there are. Bubble: (p − 1)/(m + p − 1). Stash: min(p − s, m)
micro-batches on stage s. Asks nothing of m and p.

``interleaved-1f1b`` (Narayanan et al., Megatron-LM, arXiv 2104.04473), for: v stages a device cut
1F1B's bubble by v, for v times the communication and some more stash.
Bubble: (p − 1)/(v m + p − 1) for m ≥ p. Stash: on device 0 (v − 1)⌈m/⌊m/p⌋⌉ + 2p − 1 micro-batches
of one of its stages, at most v m; where p divides m that is v p + p − 1. Megatron-LM asks that p
divides m; here every m is right. ``placed(round_robin(4))`` has v = 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, zip_longest

from fxpipe.ir.recipe import round_robin, schedule
from fxpipe.ir.task import B, F, Task, U


@schedule("1f1b")
def one_f_one_b(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Warm up, then one backward and one forward in turn, then drain.

    p = 3, m = 4, a backward drawn as long as a forward::

        0: F0 F1 F2  .  . B0 F3 B1  . B2  . B3 U
        1:  . F0 F1  . B0 F2 B1 F3 B2  . B3  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  . U
    """
    ahead = min(devices - device, microbatches)
    for i in range(ahead):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
        if i + ahead < microbatches:
            yield F(i + ahead)
    yield U()


@schedule("interleaved-1f1b", placement=round_robin(2))
def interleaved_one_f_one_b(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """A device takes a round of p micro-batches, or a few more, through each of its stages in turn.

    p = 2, m = 4, a backward drawn as long as a forward; small letters on its second stage::

        0: F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1  . b2  . b3 B2 B3 U
        1:  . F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3  . U
    """
    rounds = max(microbatches // devices, 1)
    starts = [microbatches * turn // rounds for turn in range(rounds + 1)]
    turns = [range(start, end) for start, end in pairwise(starts)]
    forwards = [F(i, stage) for turn in turns for stage in stages for i in turn]
    backwards = [B(i, stage) for turn in turns for stage in reversed(stages) for i in turn]
    ahead = 2 * (devices - device) - 1 + (len(stages) - 1) * max(map(len, turns))
    yield from forwards[:ahead]
    for backward, forward in zip_longest(backwards, forwards[ahead:]):
        yield backward
        if forward is not None:
            yield forward
    yield from map(U, stages)
