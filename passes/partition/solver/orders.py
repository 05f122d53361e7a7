"""Orders of a graph's atoms: each a way to lay out its branches, cut into runs afterwards."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence

from fxpipe.passes.partition.solver.blocks import Block, alone, latest_sources, trees, ways
from fxpipe.passes.partition.work import Machine, Work


def orders(work: Work, machine: Machine, target: float) -> Iterator[Sequence[int]]:
    """Some orders, the program's first.

    Args:
        work: the atoms.
        machine: the stages.
        target: seconds of the slowest stage that would be good.
    """
    yield range(len(work))
    yield branch_by_branch(work)
    yield longest_way_first(work)
    if machine.limited:
        yield densest_first(work, ways(work))
        yield densest_first(work, trees(alone(work), latest_sources(work)))
    for slack in (1.0, 1.003, 1.01, 1.03):
        yield filled(work, machine, target * slack)


def branch_by_branch(work: Work) -> list[int]:
    """What became ready last goes first, so that a branch is finished before the next."""
    return _listed(work, lambda atom, step: (-step, atom))


def longest_way_first(work: Work) -> list[int]:
    """What has the most work on its way to the end goes first, so that branches go abreast."""
    way = [0.0] * len(work)
    for atom in reversed(range(len(work))):
        way[atom] = work.seconds[atom] + max((way[r] for r in work.after[atom]), default=0.0)
    return _listed(work, lambda atom, step: (-way[atom], atom))


def filled(work: Work, machine: Machine, target: float) -> list[int]:
    """Fill stage after stage to ``target`` seconds, with the heaviest ready atom that fits."""
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


def densest_first(work: Work, blocks: Sequence[Block]) -> list[int]:
    """What takes the most seconds for the bytes that it keeps goes first: the first stages, which
    keep the values of the most micro-batches, then do the most work in their memory.

    Args:
        work: the atoms.
        blocks: atom → the block that it begins. As part of another one it goes first as that does.
    """
    density = [block.density for block in blocks]

    def rank(atom: int, step: int) -> tuple[float, int]:
        part_of = blocks[atom].part_of
        if part_of is not None:  # it stands before the atom, and has its rank
            density[atom] = max(density[atom], density[part_of])
        return -density[atom], atom

    return _listed(work, rank)


def _listed(work: Work, rank: Callable[[int, int], tuple[float, int]]) -> list[int]:
    """The order in which the ready atom of the lowest rank goes first."""
    missing = [len(sources) for sources in work.before]
    heap = [(rank(atom, 0), atom) for atom, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        atom = heapq.heappop(heap)[1]
        order.append(atom)
        for reader in work.after[atom]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(heap, (rank(reader, len(order)), reader))
    return order
