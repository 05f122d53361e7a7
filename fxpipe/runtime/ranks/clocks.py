"""The clocks of the ranks, compared by messages that cross, as the network's time protocol does."""

from __future__ import annotations

from math import inf
from time import perf_counter_ns

from fxpipe.runtime.ranks.group import RankGroup

_ROUNDS = 8


def ahead(group: RankGroup) -> list[int]:
    """Rank → by how many nanoseconds its clock is ahead of rank 0's.

    It is 0 where the messages do not show that the clocks differ, as on one host, whose processes
    have one clock. Otherwise it is wrong by half the time of a message at most.
    """
    least = [inf] * group.size
    for _ in range(_ROUNDS):
        sent = group.exchange("clock", perf_counter_ns())
        now = perf_counter_ns()
        least = [min(known, now - each) for known, each in zip(least, sent, strict=True)]
    # receiver → sender → the least time of a message, and by how far the receiver is ahead
    seen = group.exchange("delays", least)
    return [_difference(own[0], seen[0][rank]) for rank, own in enumerate(seen)]


def _difference(there: int, back: int) -> int:
    """How far a clock is ahead, from what a message seems to take to it and back from it."""
    return 0 if -back <= 0 <= there else (there - back) // 2
