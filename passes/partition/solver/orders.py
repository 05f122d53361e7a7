"""Orders of a graph's atoms: each a way to lay out its branches, cut into runs afterwards.

Where memory is limited, atoms that belong together because seconds are to be had for few bytes are
taken as blocks. A block is an atom and what behind it makes the two together denser: more seconds
for the bytes that stay in memory. In the order of their density, blocks give the most work that
fits. Of graphs of 10,000 atoms within limits, four towers are divided 3.6 % worse without ``trees``
and one with random edges 4 % worse without ``ways``.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fxpipe.passes.partition.work import Machine, Work, sorted_by_rank

_LEAST = 1e-12
"""Bytes of what keeps none, so that a density is finite."""


def orders(work: Work, machine: Machine, target: float) -> Iterator[Sequence[int]]:
    """Some orders, the program's first, for a slowest stage of about ``target`` seconds."""
    yield range(len(work))
    yield branch_by_branch(work)
    yield longest_way_first(work)
    if machine.limited:
        yield densest_first(work, ways(work))
        yield densest_first(work, trees(alone(work), latest_sources(work)))
    for slack in (1.0, 1.003, 1.01, 1.03):
        yield filled(work, machine, target * slack)


def branch_by_branch(work: Work) -> list[int]:
    """The atom that became ready last goes first, so that branches are finished one by one."""
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


@dataclass
class Block:
    """An atom together with later atoms that join it.

    Attributes:
        seconds: of all of it.
        kept: bytes of all of it, more than none.
        part_of: the atom whose block takes this one in.
    """

    seconds: float
    kept: float
    part_of: int | None = None

    @property
    def density(self) -> float:
        """Seconds a byte."""
        return self.seconds / self.kept

    def take_in(self, other: Block) -> None:
        """Another block as well."""
        self.seconds += other.seconds
        self.kept += other.kept


def alone(work: Work, saving: float = 1.0) -> list[Block]:
    """Each atom by itself; its parameters and so many times what it saves stay in memory."""
    kept = (r + saving * s for r, s in zip(work.resident, work.saved, strict=True))
    return [Block(s, max(k, _LEAST)) for s, k in zip(work.seconds, kept, strict=True)]


def ways(work: Work) -> list[Block]:
    """Blocks that are ways: an atom brings along the densest of its readers' ways."""
    found = alone(work)
    for atom in reversed(range(len(work))):
        densest = max(work.after[atom], key=lambda r: found[r].density, default=atom)
        if found[densest].density > found[atom].density:
            found[atom].take_in(found[densest])
            found[densest].part_of = atom
    return found


def trees(blocks: list[Block], parents: Sequence[int | None]) -> list[Block]:
    """Blocks that are trees, where an atom stands behind one other alone: its parent.

    The order of these blocks is the best then. See W. A. Horn, "Single-Machine Job Sequencing with
    Treelike Precedence Ordering and Linear Delay Penalties", SIAM Journal on Applied Mathematics,
    1972.
    """
    behind: list[list[tuple[float, int]]] = [[] for _ in blocks]  # roots, the densest first
    for atom in reversed(range(len(blocks))):
        block, heap = blocks[atom], behind[atom]
        while heap and -heap[0][0] > block.density:
            _, root = heapq.heappop(heap)
            block.take_in(blocks[root])
            blocks[root].part_of = atom
        heapq.heappush(heap, (-block.density, atom))
        parent = parents[atom]
        if parent is not None:
            small, large = sorted((heap, behind[parent]), key=len)
            for each in small:
                heapq.heappush(large, each)
            behind[parent] = large
    return blocks


def latest_sources(work: Work) -> list[int | None]:
    """Atom → the last of its sources, as parents of ``trees``."""
    return [sources[-1] if sources else None for sources in work.before]


def densest_first(work: Work, blocks: Sequence[Block]) -> list[int]:
    """What takes the most seconds for the bytes that it keeps goes first: the first stages, which
    keep the values of the most micro-batches, then do the most work in their memory.

    An atom that is part of another one's block goes first as that does.
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
    return list(sorted_by_rank(dict(enumerate(work.before)), rank))
