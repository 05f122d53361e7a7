"""Measure how near to the best the searched schedules are, and how often that is proven.

Run it with ``python -m benchmarks.searching``. It stores each row at once and continues after the
last one when it is started again; ``--rows 5-makespan,5-span`` runs only these rows. Another
``--seed`` needs another ``--progress`` file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report, finished, store
from fxpipe.extensions.simulator import Link
from fxpipe.ir.recipe import Placement

SEED = 20261122
COUNT = 100
PROGRESS = Path("build/searching.jsonl")


@dataclass(frozen=True)
class Case:
    """A search to run.

    Attributes:
        name: of its row.
        group: of the figures that it counts for.
        devices: how many.
        microbatches: of a step.
        costs: letter and stage → time.
        memory: micro-batches that a device may keep.
        latency: of transfers.
        placement: where stages are, or None for one a device.
        flush: whether one step is to be short, or each of many.
        seconds: that it may take.
    """

    name: str
    group: str
    devices: int
    microbatches: int
    costs: Mapping[tuple[str, int], float]
    memory: float | None = None
    latency: float = 0
    placement: Placement | None = None
    flush: bool = True
    seconds: float = 10


@dataclass(frozen=True)
class Row:
    """What came out; ``others`` is the best of the library."""

    name: str
    group: str
    value: float
    bound: float
    seconds: float
    others: float

    @property
    def gap(self) -> float:
        return self.value / self.bound - 1


def cases(seed: int) -> Iterator[Case]:
    """100 random problems for both aims, and then the large ones."""
    random = Random(seed)
    for number in range(COUNT):
        devices, microbatches = random.randint(2, 8), random.randint(2, 16)
        drawn: dict[str, Any] = {
            "devices": devices,
            "microbatches": microbatches,
            "costs": times(random, devices, 4, 20),
            # from the least that is possible to none
            "memory": random.choice([1, 1.5, 2, 3, 4, devices, 1.5 * devices, 2 * devices, None]),
            "latency": random.choice([0, 0, 1, 3]),
        }
        yield Case(f"{number}-makespan", "makespan", **drawn)
        yield Case(f"{number}-span", "span", **drawn, flush=False)
    for number in range(6):
        memory = random.choice([4, 8, 12, 16, None])
        yield Case(f"8x32-{number}", "p = 8, m = 32", 8, 32, times(random, 8, 4, 20), memory)
    for share, word in ((2, "2p"), (1, "p")):
        for spread, low in (("unequal", 8), ("nearly equal", 18), ("equal", 20)):
            costs = times(random, 64, low, 20)
            name, group = f"64x256-{word}-{spread}", f"p = 64, m = 256, memory {word}"
            yield Case(name, group, 64, 256, costs, 64 * share, seconds=30)
    for devices in (4, 8, 16):
        costs = times(random, 2 * devices, 8, 20)
        for name, word, placement in (
            ("v", "V", fxpipe.vee),
            ("loop", "round robin", fxpipe.round_robin(2)),
        ):
            group = f"{word}, ample memory"
            yield Case(f"{name}-{devices}", group, devices, 2 * devices, costs, placement=placement)


def times(random: Random, stages: int, low: int, high: int) -> dict[tuple[str, int], float]:
    costs = {(k, s): float(random.randint(low, high)) for k in "FIW" for s in range(stages)}
    return costs | {("U", s): 0 for s in range(stages)}


def run(case: Case) -> Row:
    start = perf_counter()
    found = fxpipe.search_schedule(
        case.costs,
        case.microbatches,
        devices=case.devices,
        placement=case.placement,
        memory=case.memory,
        links=Link(case.latency),
        flush=case.flush,
        seconds=case.seconds,
    )
    seconds = perf_counter() - start
    found.schedule.verify()
    others = min(found.library.values(), default=inf)
    return Row(case.name, case.group, found.value, found.bound, seconds, others)


def figures_of(rows: list[Row]) -> Iterator[Figure]:
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        proven = sum(row.gap < 1e-9 for row in own)
        yield Figure(f"{group}: problems", len(own))
        yield Figure(f"{group}: proven optimal", proven)
        yield Figure(f"{group}: greatest gap", 100 * max(row.gap for row in own), "%")
        yield Figure(f"{group}: median time", median(row.seconds for row in own), "s")
        yield Figure(f"{group}: longest time", max(row.seconds for row in own), "s")
        slower = sum(row.value > row.others * (1 + 1e-9) for row in own)
        yield Figure(f"{group}: slower than the library", slower)


def main() -> int:
    parser = argparse.ArgumentParser(description="Search schedules, and count proofs and gaps.")
    parser.add_argument(
        "--rows", help="run only these rows, separated by commas, and write no report"
    )
    parser.add_argument("--progress", type=Path, default=PROGRESS, help="file that stores the rows")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of all problems")
    given = parser.parse_args()
    machine = describe()
    named = given.rows.split(",") if given.rows else None
    done = {} if named else finished(Row, given.progress)
    rows = []
    for case in cases(given.seed):
        if named is not None and case.name not in named:
            continue
        row = done.get(case.name)
        if row is None:
            row = run(case)
            if named is None:
                store(row, given.progress)
        rows.append(row)
        print(
            f"{row.name:24} {row.value:9.6g} bound {row.bound:9.6g} gap {row.gap:7.3%} "
            f"others {row.others / row.value - 1:+7.2%} {row.seconds:6.2f} s",
            flush=True,
        )
    if named is not None:
        return 0
    open_rows = [row for row in rows if row.gap >= 1e-9]
    cells = [
        [row.name, f"{row.value:.6g}", f"{row.bound:.6g}", f"{row.gap:.2%}", f"{row.seconds:.1f} s"]
        for row in open_rows
    ]
    settings: dict[str, str | int] = {"random problems": COUNT, "seed": given.seed}
    title = "Searching schedules"
    grids = [Grid(["not proven optimal", "time", "bound", "gap", "took"], cells)]
    Report("searching", title, settings, list(figures_of(rows)), machine, grids).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
