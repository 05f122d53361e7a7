"""Search schedules for the settings of the zero-bubble papers, beside what their heuristics found.

Run it with ``python -m benchmarks.heuristics``. The 21 settings and their rates are in
``tests/published/zero-bubble-rates.csv``; a rate is the share of a step that is bubble, from a
device's first task to its last, as the authors count it. It stores each row at once and continues
after the last one when it is started again.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report, finished, store
from fxpipe.extensions.simulator import Link, Sizes
from fxpipe.ir.recipe import Placement

RATES = Path(__file__).parent.parent / "tests" / "published" / "zero-bubble-rates.csv"
PROGRESS = Path("build/heuristics.jsonl")
LENGTH = 1024
"""Tokens of a sequence in all settings."""

EQUAL = 5.1e-5
"""Rates are published with four decimals, of which some were cut off."""


@dataclass(frozen=True)
class Case:
    """A setting and what was published for it.

    Attributes:
        name: the table, devices, micro-batches, hidden size and heuristic.
        devices: how many.
        microbatches: of a step.
        costs: letter → microseconds of a stage.
        latency: of a transfer, in microseconds.
        memory: what a device may keep.
        sizes: what the stages keep for a micro-batch, and until its weight gradient.
        placement: where stages are, or None for one a device.
        published: the rate that the heuristic's schedule has.
    """

    name: str
    devices: int
    microbatches: int
    costs: dict[str, float]
    latency: float
    memory: float
    sizes: Sizes
    placement: Placement | None
    published: float


@dataclass(frozen=True)
class Row:
    """What came out: rates, and the seconds of the search."""

    name: str
    rate: float
    least: float
    published: float
    seconds: float

    @property
    def loses(self) -> bool:
        return self.rate > self.published + EQUAL


def cases() -> Iterator[Case]:
    """Every published rate of a heuristic: in 1F1B's memory, in twice that, and in a V."""
    lines = (line for line in RATES.read_text().splitlines() if not line.startswith("#"))
    for row in csv.DictReader(lines):
        p, m = int(row["p"]), int(row["m"])
        # of a layer, per token, as in the paper: 34 h + 5 a s, of which 32 h are for the weights
        kept, late = (
            34 * int(row["hidden"]) + 5 * int(row["heads"]) * LENGTH,
            32 * int(row["hidden"]),
        )
        for heuristic, memory, placement in (
            ("zb-1p", p * kept, None),
            ("zb-2p", 2 * p * kept, None),
            ("zb-v", p * kept, fxpipe.vee),
        ):
            if row[heuristic]:
                chunks = 1 if placement is None else 2
                stages = range(p * chunks)
                sizes = Sizes(
                    saved=dict.fromkeys(stages, kept // chunks),
                    deferred=dict.fromkeys(stages, late // chunks),
                )
                costs = {kind: int(row[kind]) / chunks for kind in "FIW"} | {"U": 0.0}
                name, latency = (
                    f"{row['table']} {p}x{m} h{row['hidden']} {heuristic}",
                    float(row["comm"]),
                )
                rate = float(row[heuristic])
                yield Case(name, p, m, costs, latency, memory, sizes, placement, rate)


def run(case: Case, seconds: float) -> Row:
    start = perf_counter()
    found = fxpipe.search_schedule(
        case.costs,
        case.microbatches,
        devices=case.devices,
        placement=case.placement,
        memory=case.memory,
        sizes=case.sizes,
        links=Link(case.latency),
        flush=False,
        seconds=seconds,
    )
    took = perf_counter() - start
    found.schedule.verify()
    chunks = 1 if case.placement is None else 2
    work = case.microbatches * chunks * sum(case.costs.values())
    return Row(case.name, 1 - work / found.value, 1 - work / found.bound, case.published, took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=10, help="that each search may take")
    parser.add_argument("--progress", type=Path, default=PROGRESS, help="file that stores the rows")
    given = parser.parse_args()
    machine, done, rows = describe(), finished(Row, given.progress), []
    for case in sorted(cases(), key=lambda case: case.devices * case.microbatches):
        row = done.get(case.name)
        if row is None:
            row = run(case, given.seconds)
            store(row, given.progress)
        rows.append(row)
        print(
            f"{row.name:26} found {row.rate:.4f} published {row.published:.4f} "
            f"least {row.least:.4f} {row.seconds:5.1f} s{' LOSES' if row.loses else ''}",
            flush=True,
        )
    figures = [
        Figure("settings", len(rows)),
        Figure("less bubble than published", sum(r.rate < r.published - EQUAL for r in rows)),
        Figure("more bubble than published", sum(r.loses for r in rows)),
        Figure("proven optimal", sum(abs(r.rate - r.least) < 1e-9 for r in rows)),
        Figure("longest time", max(r.seconds for r in rows), "s"),
    ]
    cells = [
        [
            r.name,
            f"{r.rate:.4f}",
            f"{r.published:.4f}",
            f"{max(r.least, 0):.4f}",
            f"{r.seconds:.1f} s",
        ]
        for r in rows
    ]
    grid = Grid(["setting", "found", "published", "none has less than", "took"], cells)
    settings: dict[str, str | int] = {"seconds": str(given.seconds)}
    title = "Searched schedules beside zero bubble's heuristics"
    Report("heuristics", title, settings, figures, machine, [grid]).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
