"""Time the division of large graphs into stages, and compare that of chains with torchgpipe.

Graphs are divided among equal devices, over links, and within memory limits that the first stages,
which hold the most micro-batches, would exceed if work were divided evenly.

Run it with ``python -m benchmarks.partition``. If torchgpipe is installed, its ``balance_by_time``
divides chains by the same times of layers.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.machine import describe
from benchmarks.report import Figure, Report, timed
from fxpipe.passes.partition.solve import Partitioner
from fxpipe.passes.partition.work import StageDevices, Transfer, Work

ATOMS = 10_000
REPEATS = 3
CHAINS = 200
KINDS = ("chain with skips", "four towers", "random edges")
STAGES = (8, 64)
SAVED = 1000
"""Bytes that each atom saves; values have about half as many."""
LINK = 1e-3
"""Seconds a byte: a value takes about as long as a sixth of an atom."""


def main() -> int:
    """Run the benchmark; returns 1 if a chain is divided worse than by torchgpipe."""
    machine = describe()
    figures: list[Figure] = []
    fine = True
    for kind, stages in itertools.product(KINDS, STAGES):
        work = graph(kind, random.Random(0))
        for what, devices in machines(stages).items():
            divide = partial(Partitioner().divide, work, devices)
            runs = [timed(divide) for _ in range(REPEATS)]
            found = runs[0][0]
            assert found is not None
            name = f"{kind}, {stages} stages, {what}"
            figures.append(Figure(name, median(seconds for _, seconds in runs), "s"))
            even = work.total / stages
            figures.append(Figure(f"{name}: slowest stage over even ones", found.slowest / even))
    ratios = beside_torchgpipe()
    if ratios:
        fine = fine and max(ratios) <= 1 + 1e-9
        figures.append(Figure("slowest stage over torchgpipe's, median", median(ratios)))
        figures.append(Figure("slowest stage over torchgpipe's, greatest", max(ratios)))
    settings = {"atoms": ATOMS, "repeats": REPEATS, "chains beside torchgpipe": len(ratios)}
    Report("partition", "Dividing graphs among stages", settings, figures, machine).publish()
    return 0 if fine else 1


def machines(stages: int) -> dict[str, StageDevices]:
    """What is asked of the devices → the devices."""
    equal = StageDevices.equal(stages)
    peaks = tuple(range(stages, 0, -1))
    return {
        "equal devices": equal,
        "over links": replace(equal, per_byte=((LINK,) * stages,) * stages),
        "within limits": replace(equal, limits=(0.75 * ATOMS * SAVED,) * stages, peaks=peaks),
    }


def graph(kind: str, dice: random.Random) -> Work:
    """A large graph with times that differ much."""
    step = 4 if kind == "four towers" else 1

    def source(atom: int) -> int:
        return dice.randrange(max(0, atom - 20), atom) if kind == "random edges" else atom - step

    values = [
        Transfer(source(atom), (atom,), dice.randrange(1000), True) for atom in range(step, ATOMS)
    ]
    values += [
        Transfer(atom - 40, (atom,), dice.randrange(1000), True) for atom in range(40, ATOMS, 16)
    ]
    seconds = tuple(dice.lognormvariate(0, 1.5) for _ in range(ATOMS))
    return Work(seconds, (1,) * ATOMS, (SAVED,) * ATOMS, tuple(values))


def beside_torchgpipe() -> list[float]:
    """For chains of layers our slowest stage over that of torchgpipe's blocks."""
    try:
        blocks = importlib.import_module("torchgpipe.balance.blockpartition")
    except ImportError:
        print("torchgpipe is not installed: nothing to stand beside")
        return []
    dice = random.Random(1)
    ratios = []
    for _ in range(CHAINS):
        stages = dice.randrange(2, 9)
        seconds = [dice.lognormvariate(0, 1) for _ in range(dice.randrange(2 * stages, 120))]
        theirs = max(map(sum, blocks.solve(seconds, partitions=stages)))
        values = tuple(Transfer(i, (i + 1,), 1, True) for i in range(len(seconds) - 1))
        none = (0,) * len(seconds)
        work = Work(tuple(seconds), none, none, values)
        found = Partitioner().divide(work, StageDevices.equal(stages))
        assert found is not None
        ratios.append(found.slowest / theirs)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
