"""Blocks of atoms that belong together where seconds are to be had for few bytes.

A block is an atom and what behind it makes the two together denser: more seconds for the bytes
that stay in memory. Taken in the order of their density, blocks give the most work that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.passes.partition.work import Work

_LEAST = 1e-12
"""Bytes of what keeps none, so that a density is finite."""


@dataclass
class Block:
    """An atom with what it brings along.

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
    """Blocks that are trees, where an atom stands behind one other alone.

    The order of these blocks is the best then. See W. A. Horn, "Single-Machine Job Sequencing with
    Treelike Precedence Ordering and Linear Delay Penalties", SIAM Journal on Applied Mathematics,
    1972.

    Args:
        blocks: each atom by itself; changed.
        parents: atom → the one that it stands behind, of a lower number.
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
