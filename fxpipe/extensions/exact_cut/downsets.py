"""Search all divisions of a graph that has few.

The first k stages together hold a downset, so a division is a chain of downsets. Where branches of
a model meet in one value, the downsets before and after it add up instead of multiplying, so that
small and narrow graphs have few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from fxpipe.passes.partition.work import Division, Machine, Work, weigh

_DOWNSETS = 500
"""The most downsets of a graph that is searched."""
_TRIED = 5_000
"""The most partial chains to try."""


def downsets(work: Work, most: int) -> list[int] | None:
    """Return all downsets as bit sets, smaller ones first; None if there are more than ``most``."""
    before = [sum(1 << source for source in sources) for sources in work.before]
    level = {0: [atom for atom, sources in enumerate(before) if not sources]}
    sets = [0]
    while level:
        following: dict[int, list[int]] = {}
        for downset, ready in level.items():
            for atom in ready:
                larger = downset | 1 << atom
                if larger not in following:
                    following[larger] = [other for other in ready if other != atom]
                    following[larger] += [r for r in work.after[atom] if before[r] & ~larger == 0]
        sets += following
        if len(sets) > most:
            return None
        level = following
    return sets


def searched(work: Work, machine: Machine, best: Division | None) -> Division | None:
    """Return the fastest division that keeps the limits, by branch and bound; or ``best``, if there
    are too many divisions to tell, or none is faster."""
    sets = downsets(work, _DOWNSETS)
    if sets is None:
        return best
    seconds = {each: math.fsum(work.seconds[atom] for atom in _atoms(each)) for each in sets}
    ahead = [math.fsum(machine.speeds[stage:]) for stage in range(machine.stages)]
    left = _TRIED

    def extend(chain: list[int]) -> None:
        """Try all ways on from a chain of downsets, those with the least to do first."""
        nonlocal best, left
        stage, start = len(chain) - 1, chain[-1]
        if stage == machine.stages:
            division = weigh(work, machine, _stages_between(chain, len(work)))
            faster = best is None or division.slowest < best.slowest
            best = division if faster and division.fits(machine) else best
            return
        last = stage == machine.stages - 1
        ways = []
        for end in sets[-1:] if last else sets:
            if end != start and not start & ~end:
                bound = (seconds[end] - seconds[start]) / machine.speeds[stage]
                if not last:
                    bound = max(bound, (seconds[sets[-1]] - seconds[end]) / ahead[stage + 1])
                ways.append((bound, end))
        for bound, end in sorted(ways):
            if left <= 0 or (best is not None and bound >= best.slowest):
                return
            left -= 1
            extend([*chain, end])

    extend([0])
    return best


def _atoms(downset: int) -> Iterator[int]:
    """Yield the atoms of a bit set."""
    while downset:
        yield (downset & -downset).bit_length() - 1
        downset &= downset - 1


def _stages_between(chain: list[int], atoms: int) -> list[int]:
    """Turn a chain of downsets, from the empty one to that of all atoms, into atom → stage."""
    stage_of = [0] * atoms
    for stage, (start, end) in enumerate(pairwise(chain)):
        for atom in _atoms(end & ~start):
            stage_of[atom] = stage
    return stage_of
