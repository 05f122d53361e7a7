"""A schedule's exact makespan, bubble and stash, for given counts and all times of its tasks.

A run ends when its longest path ends, and a path's time is linear in the times of its tasks. So the
makespan is a maximum of linear forms. If it is linear on all edges of the cone of times and in its
middle, one form is the greatest everywhere, for such a maximum is convex.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from sympy import ZZ
from sympy.polys.matrices import DomainMatrix

from fxpipe.extensions.formulas.formulas import Basis, Vector
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS
from fxpipe.passes.lowering.pairs import Pairs


@dataclass(frozen=True)
class Sample:
    """One run, as linear forms in the basic times; None if another path is the longest at others.

    Attributes:
        makespan: the time until everything is done.
        through: the time until the last micro-batch is through.
        size: the most that a device idles between its first task and its last.
        work: the time of all micro-batch tasks.
        stash: stage → the most micro-batches that it keeps at once.
        peak: the most micro-batches that a device's stages together keep at once.
    """

    makespan: Vector | None
    through: Vector | None
    size: Vector | None
    work: Vector | None
    stash: Sequence[int]
    peak: int


def sample(program: Program, basis: Basis, pairs: Pairs, steps: int) -> Sample:
    """Simulate a program at enough times of tasks and pairs to know its results for all times.

    Raises:
        InputError: the program gets stuck.
    """
    edges = edges_of(basis.walls, len(basis.symbols))
    # with unequal weights, to keep off symmetries
    weighted = [[(2 * k + 3) * x for x in edge] for k, edge in enumerate(edges)]
    times = [*edges, tuple(map(sum, zip(*weighted, strict=True)))]
    once = [letter for letter, kind in KINDS.items() if not kind.per_microbatch]
    results: list[tuple[float, ...]] = []
    for one in times:
        costs: dict[str, float] = dict.fromkeys(KINDS, 0)
        costs |= {letter: dot(column, one) for letter, column in basis.columns.items()}
        whole = simulate(program, costs, pairs=pairs, steps=steps)
        ran = simulate(program, costs | dict.fromkeys(once, 0), pairs=pairs, steps=steps)
        results.append((whole.makespan, ran.through, ran.bubble_size, sum(ran.busy)))
    makespan, through, size, work = (_linear(times, row) for row in zip(*results, strict=True))
    return Sample(makespan, through, size, work, ran.stash, max(ran.device_stash))


def dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _linear(times: Sequence[Vector], values: Sequence[float]) -> Vector | None:
    """The linear form that has these values at these times, or None if there is none."""
    rows = [[*one, int(value)] for one, value in zip(times, values, strict=True)]
    reduced, divisor, solved = DomainMatrix(rows, (len(rows), len(rows[0])), ZZ).rref_den()
    if len(times[0]) in solved:
        return None
    return tuple(int(row[-1]) // int(divisor) for row in reduced.to_list()[: len(solved)])


def edges_of(walls: Iterable[Vector], size: int) -> Sequence[Vector]:
    """The edges of the cone of ``size`` times that are at least 0, as are their products with the
    walls.

    This is the double description method (Fukuda and Prodon, 1996). Wall by wall, the edges beyond
    the wall are dropped, and a new one is added wherever the wall cuts the face between two
    neighbours. Each edge has the walls in which it lies as bits.
    """
    every = range(size)
    edges = {tuple(int(i == j) for j in every): sum(1 << j for j in every if j != i) for i in every}
    for number, wall in enumerate(walls, start=size):
        side = {edge: dot(wall, edge) for edge in edges}
        kept = {
            e: on | (1 << number if not side[e] else 0) for e, on in edges.items() if side[e] >= 0
        }
        for a, b in product((e for e in edges if side[e] > 0), (e for e in edges if side[e] < 0)):
            both = edges[a] & edges[b]
            if all(both & ~on or e in (a, b) for e, on in edges.items()):
                cut = [side[a] * y - side[b] * x for x, y in zip(a, b, strict=True)]
                kept[tuple(x // gcd(*cut) for x in cut)] = both | 1 << number
        edges = kept
    return sorted(edges)
