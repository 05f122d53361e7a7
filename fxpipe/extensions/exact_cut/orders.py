"""Order a graph's atoms in several ways, each to be cut into runs afterwards.

Orders differ in how they lay out the branches of a graph.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

from fxpipe.passes.partition.work import Machine, Work, sorted_by_rank


def orders(work: Work, machine: Machine, target: float) -> Iterator[Sequence[int]]:
    """Yield orders, the program's first, for a slowest stage of about ``target`` seconds."""
    yield range(len(work))
    yield _listed(work, lambda atom, step: (-step, atom))  # branch by branch: the last ready first
    yield longest_way_first(work)
    yield filled(work, machine, target)


def longest_way_first(work: Work) -> list[int]:
    """Take the atom with the most work left on a path to the end, so that branches go abreast."""
    left = [0.0] * len(work)
    for atom in reversed(range(len(work))):
        left[atom] = work.seconds[atom] + max((left[r] for r in work.after[atom]), default=0.0)
    return _listed(work, lambda atom, step: (-left[atom], atom))


def filled(work: Work, machine: Machine, target: float) -> list[int]:
    """Fill stage after stage up to ``target`` seconds, with the heaviest ready atom that fits."""
    missing = [len(sources) for sources in work.before]
    ready = sorted((work.seconds[a], -a) for a, count in enumerate(missing) if not count)
    order: list[int] = []
    stage, room = 0, target * machine.speeds[0]
    while ready:
        place = bisect.bisect_right(ready, (room, 1)) - 1
        if place < 0 and stage < machine.stages - 1:
            stage += 1
            room = target * machine.speeds[stage]
            continue
        seconds, negative = ready.pop(max(place, 0))
        room -= seconds
        order.append(-negative)
        for reader in work.after[-negative]:
            missing[reader] -= 1
            if not missing[reader]:
                bisect.insort(ready, (work.seconds[reader], -reader))
    return order


def _listed(work: Work, rank: Callable[[int, int], tuple[float, int]]) -> list[int]:
    return list(sorted_by_rank(dict(enumerate(work.before)), rank))
