"""Order a graph's atoms in several ways, each to be cut into runs afterwards.

Orders differ in how they lay out the branches of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxpipe.passes.partition.work import Work, sorted_by_rank


def orders(work: Work) -> Iterator[Sequence[int]]:
    """Yield orders, the program's first."""
    yield range(len(work))
    yield _listed(work, lambda atom, step: (-step, atom))  # branch by branch: the last ready first
    yield longest_way_first(work)


def longest_way_first(work: Work) -> list[int]:
    """Take the atom with the most work left on a path to the end, so that branches go abreast."""
    left = [0.0] * len(work)
    for atom in reversed(range(len(work))):
        left[atom] = work.seconds[atom] + max((left[r] for r in work.after[atom]), default=0.0)
    return _listed(work, lambda atom, step: (-left[atom], atom))


def _listed(work: Work, rank: Callable[[int, int], tuple[float, int]]) -> list[int]:
    return list(sorted_by_rank(dict(enumerate(work.before)), rank))
