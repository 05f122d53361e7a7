"""Divide work among stages: minimise the slowest stage, then the bytes sent.

1. Cut several orders of the graph, the program's first, into runs, each in the best way. For a
   model that is a chain of atoms the first is exact.
2. Among the cuts of the best order that are at most SLACK slower than it, take the one that sends
   the fewest bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from fxpipe.passes.partition.runs import Runs
from fxpipe.passes.partition.work import (
    Division,
    StageDevices,
    Work,
    sorted_by_rank,
    weigh,
)
from fxpipe.torchtools.state import intra_op_threads

SLACK = 0.01
"""How much slower than the best the slowest stage may be: measured times are no more exact."""

_CAPS = (1.02, 1.1, 1.5, 4.0, 16.0, 64.0)
"""Caps on the slowest stage to try in turn, relative to the least time: tight ones are faster."""


class Partitioner:
    """Divides work among stages: cuts several orders of the operations in the best way, within
    links and limits. An extension may have another one."""

    @intra_op_threads(1)  # the tables are small: starting threads would take longer
    def divide(self, work: Work, machine: StageDevices) -> Division | None:
        """Divide the atoms, of which there are at least as many as stages; None if no division
        found keeps the memory limits. Of divisions whose slowest stage is within one hundredth of
        the best found, it is the one that sends the fewest bytes."""
        least = max(work.total / sum(machine.speeds), max(work.seconds) / max(machine.speeds))
        best: Division | None = None
        for order in orders(work):
            stage_of = _fastest(work, machine, order, least, best)
            division = best if stage_of is None else weigh(work, machine, stage_of)
            if division is not None and (best is None or division.slowest < best.slowest):
                best = division if division.fits(machine) else best
            if best is not None and best.slowest <= least * (1 + SLACK):
                break
        return None if best is None else _with_fewest_bytes(work, machine, best)

    @intra_op_threads(1)
    def nearest(self, work: Work, machine: StageDevices) -> Division:
        """The cut of the program's order that comes nearest to the memory limits, where ``divide``
        finds none: it keeps them once all are scaled by the least common factor."""
        order = range(len(work))
        cuts = Runs(work, machine, order).cut("memory", math.inf)
        assert cuts is not None
        return weigh(work, machine, _stages(order, cuts))


def orders(work: Work) -> Iterator[Sequence[int]]:
    """Yield orders of the atoms, which lay out the branches of a graph in different ways."""

    def listed(rank: Callable[[int, int], tuple[float, int]]) -> list[int]:
        return list(sorted_by_rank(dict(enumerate(work.before)), rank))

    yield range(len(work))  # the program's
    yield listed(lambda atom, step: (-step, atom))  # branch by branch: the last ready first
    # abreast: the atom with the most work left on a path to the end first
    left = [0.0] * len(work)
    for atom in reversed(range(len(work))):
        left[atom] = work.seconds[atom] + max((left[r] for r in work.after[atom]), default=0.0)
    yield listed(lambda atom, step: (-left[atom], atom))


def _fastest(
    work: Work, machine: StageDevices, order: Sequence[int], least: float, best: Division | None
) -> list[int] | None:
    """Atom → stage for the best cut of an order into runs; None if none is as fast as ``best`` and
    keeps the limits."""
    if best is not None:
        most = best.slowest
    else:
        most = math.inf if machine.linked else work.total / min(machine.speeds)
    runs = Runs(work, machine, order)
    for cap in (*(least * cap for cap in _CAPS if least * cap < most), most):
        if (found := runs.cut("seconds", cap)) is not None:
            return _stages(order, found)
    return None


def _with_fewest_bytes(work: Work, machine: StageDevices, best: Division) -> Division:
    """Return a division that sends fewer bytes and is nearly as fast, or ``best`` itself."""
    order = sorted(range(len(work)), key=best.stage_of.__getitem__)
    cap = best.slowest * (1 + SLACK)
    cuts = Runs(work, machine, order).cut("bytes", cap)
    if cuts is None:
        return best
    division = weigh(work, machine, _stages(order, cuts))
    fits = division.fits(machine) and division.slowest <= cap * (1 + 1e-9)
    return division if fits and division.crossing <= best.crossing else best


def _stages(order: Sequence[int], cuts: Sequence[int]) -> list[int]:
    stage_of = [0] * len(order)
    for stage, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(order)])):
        for atom in order[start:end]:
            stage_of[atom] = stage
    return stage_of
