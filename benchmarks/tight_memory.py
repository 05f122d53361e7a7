"""Search schedules of a V in limited memory, beside those of zero bubble's heuristic.

Run it with ``python -m benchmarks.tight_memory``. The rates are in
``tests/published/zero-bubble-memory.csv``, the times in ``zero-bubble-rates.csv`` beside it. It
stores each row at once and continues after the last one when it is started again.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import fxpipe
from benchmarks.heuristics import EQUAL, LENGTH, RATES
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report, finished, store
from fxpipe.extensions.search.timing import peaks_of_order
from fxpipe.extensions.simulator import Link, Sizes

MEMORY = RATES.parent / "zero-bubble-memory.csv"
PROGRESS = Path("build/tight-memory.jsonl")
LIMITS = (1.0, 1.125, 1.25, 1.375, 1.5)
"""Memory of a device, as a multiple of what 1F1B keeps on the first."""


@dataclass(frozen=True)
class Row:
    """What came out of a setting.

    Attributes:
        name: devices, micro-batches and limit.
        rate: the share of a step that is bubble, from a device's first task to its last.
        published: the same of the heuristic's schedule.
        least: none has less.
        library: the time of a step, as a share of that of the library's best schedule that fits.
        used: the most memory that a device uses, as a share of the limit.
        seconds: of the processor.
    """

    name: str
    rate: float
    published: float
    least: float
    library: float
    used: float
    seconds: float

    @property
    def longer(self) -> float:
        """By how much a step is longer than the heuristic's."""
        return (1 - self.published) / (1 - self.rate) - 1


def table(path: Path) -> Iterator[dict[str, str]]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    yield from csv.DictReader(lines)


def run(times: dict[str, str], limit: float, published: float, seconds: float) -> Row:
    p, m = int(times["p"]), int(times["m"])
    hidden, heads = int(times["hidden"]), int(times["heads"])
    # of a layer, per token, as in the paper: 34 h + 5 a s, of which 32 h are for the weights
    kept, late = 34 * hidden + 5 * heads * LENGTH, 32 * hidden
    stages = range(2 * p)
    costs = {kind: int(times[kind]) / 2 for kind in "FIW"} | {"U": 0.0}
    start = process_time()
    found = fxpipe.search_schedule(
        costs,
        m,
        devices=p,
        placement=fxpipe.vee,
        memory=limit * 2 * p * kept,
        sizes=Sizes(saved=dict.fromkeys(stages, kept), deferred=dict.fromkeys(stages, late)),
        links=Link(float(times["comm"])),
        flush=False,
        seconds=seconds,
    )
    took = process_time() - start
    found.schedule.verify()
    order = found.problem.order_of(found.schedule)
    assert order is not None
    work = 2 * m * sum(costs.values())
    return Row(
        f"{p}x{m} {limit:g}",
        1 - work / found.value,
        published,
        1 - work / found.bound,
        found.value / min(found.library.values()),
        max(peaks_of_order(found.problem, order)) / found.problem.memory[0],
        took,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=10, help="that each search may take")
    parser.add_argument("--limits", type=float, nargs="+", default=LIMITS, help="to search with")
    parser.add_argument("--progress", type=Path, default=PROGRESS, help="file that stores the rows")
    given = parser.parse_args()
    machine, done, rows = describe(), finished(Row, given.progress), []
    settings = {(r["p"], r["m"]): r for r in table(RATES) if r["table"] == "arxiv"}
    for point in table(MEMORY):
        limit = float(point["limit"])
        if limit not in given.limits:
            continue
        row = done.get(f"{point['p']}x{point['m']} {limit:g}")
        if row is None:
            times = settings[point["p"], point["m"]]
            row = run(times, limit, float(point["zb-v"]), given.seconds)
            store(row, given.progress)
        rows.append(row)
        print(
            f"{row.name:14} found {row.rate:.4f} published {row.published:.4f} steps "
            f"{row.longer:+.2%} used {row.used:.3f} {row.seconds:5.1f} s",
            flush=True,
        )
    figures = [
        Figure("settings", len(rows)),
        Figure("shorter steps than published", sum(r.rate < r.published - EQUAL for r in rows)),
        Figure("longer steps than published", sum(r.rate > r.published + EQUAL for r in rows)),
        Figure("longest, beside the published", 100 * max(r.longer for r in rows), "%"),
        Figure("least memory used", 100 * min(r.used for r in rows), "%"),
    ]
    cells = [
        [
            r.name,
            f"{r.rate:.4f}",
            f"{r.published:.4f}",
            f"{max(r.least, 0):.4f}",
            f"{r.longer:+.2%}",
            f"{r.library - 1:+.2%}",
            f"{r.used:.3f}",
            f"{r.seconds:.1f} s",
        ]
        for r in rows
    ]
    columns = ["setting", "found", "published", "none has less than", "step", "beside the library"]
    grid = Grid([*columns, "memory used", "took"], cells)
    title = "Searched schedules of a V in limited memory, beside zero bubble's heuristic"
    options: dict[str, str | int] = {"seconds": str(given.seconds)}
    Report("tight-memory", title, options, figures, machine, [grid]).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
