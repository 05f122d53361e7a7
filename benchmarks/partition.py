"""How long dividing large graphs takes, and how well chains are divided beside torchgpipe.

Run it with ``python -m benchmarks.partition``; with torchgpipe installed it compares with its
``balance_by_time`` on the same times of layers.
"""

from __future__ import annotations

import importlib
import random
import sys
from functools import partial
from statistics import median

from benchmarks.machine import describe
from benchmarks.report import Figure, Report, timed
from fxpipe.passes.solve import SLACK, solve
from fxpipe.passes.work import Machine, Transfer, Work

ATOMS = 10_000
REPEATS = 3
CHAINS = 200


def main() -> int:
    """Returns the exit status: 1 where a bound is not proven, or a chain is divided worse."""
    machine = describe()
    figures: list[Figure] = []
    fine = True
    for kind in ("chain with skips", "four towers"):
        for stages in (8, 64):
            work = graph(kind, random.Random(0))
            divide = partial(solve, work, Machine.equal(stages))
            runs = [timed(divide) for _ in range(REPEATS)]
            found = runs[0][0]
            assert found is not None
            fine = fine and found.gap <= SLACK
            name = f"{kind}, {stages} stages"
            figures.append(Figure(name, median(seconds for _, seconds in runs), "s"))
            figures.append(Figure(f"{name}, gap to the bound", 100 * found.gap, "%"))
    ratios = beside_torchgpipe()
    if ratios:
        fine = fine and max(ratios) <= 1 + 1e-9
        figures.append(Figure("slowest stage over torchgpipe's, median", median(ratios)))
        figures.append(Figure("slowest stage over torchgpipe's, greatest", max(ratios)))
    settings = {"atoms": ATOMS, "repeats": REPEATS, "chains beside torchgpipe": len(ratios)}
    Report("partition", "Dividing graphs among stages", settings, figures, machine).publish()
    return 0 if fine else 1


def graph(kind: str, dice: random.Random) -> Work:
    """A large graph with times that differ much."""
    step = 4 if kind == "four towers" else 1
    values = [
        Transfer(atom - step, (atom,), dice.randrange(1000), True) for atom in range(step, ATOMS)
    ]
    values += [
        Transfer(atom - 40, (atom,), dice.randrange(1000), True) for atom in range(40, ATOMS, 16)
    ]
    seconds = tuple(dice.lognormvariate(0, 1.5) for _ in range(ATOMS))
    return Work(seconds, (1,) * ATOMS, (1,) * ATOMS, tuple(values))


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
        found = solve(work, Machine.equal(stages), range(len(seconds)))
        assert found is not None
        ratios.append(found.division.slowest / theirs)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
