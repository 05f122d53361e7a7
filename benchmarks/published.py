"""Predict published runs from FLOPs and bytes alone, and show both side by side.

``published_runs.csv`` has the figures of the papers, with all that they tell. Devices are the
presets of ``fxpipe.extensions.paper``, the same for all tables. One efficiency a paper, or a model
of torchgpipe's, is fitted on one row, which is named and not counted.

Run it with ``python -m benchmarks.published``; it takes some minutes of one core, and writes
``results/published.csv``. ``--draw FILE`` draws what was written there instead.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks import published_gpt as gpt
from benchmarks import published_images as images
from fxpipe.extensions.tables import plain_table, table_text

FOLDER = Path(__file__).parent
RUNS, RESULTS = FOLDER / "published_runs.csv", FOLDER / "results" / "published.csv"

Row = Mapping[str, str]


class Found(NamedTuple):
    """A published figure and its prediction.

    Attributes:
        table: of the paper.
        run: what was run.
        unit: of the figures.
        published: the figure of the paper.
        predicted: ours.
        fitted: the efficiency, if it was fitted on this row, which then does not count.
    """

    table: str
    run: str
    unit: str
    published: float
    predicted: float
    fitted: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def rows() -> list[dict[str, str]]:
    """The published figures."""
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


def results() -> list[Found]:
    """The predictions that were written last."""
    with RESULTS.open(newline="") as file:
        made = [*csv.DictReader(file)]
    numbers = [(float(r["published"]), float(r["predicted"])) for r in made]
    return [
        Found(r["table"], r["run"], r["unit"], *pair, r["fitted"])
        for r, pair in zip(made, numbers, strict=True)
    ]


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
        name: of the table.
        rows: the figures.
        predict: row and efficiency → prediction.
        star: the row that the efficiency is fitted on; None for figures that need none.
    """

    name: str
    rows: Sequence[Row]
    predict: Callable[[Row, float], float]
    star: Row | None


ZERO_BUBBLE_FITTED = "GPT 28.3B", "1f1b-i", "128"
MEGATRON_FITTED = "GPT 76.1B"


def tables() -> Iterator[Table]:
    """The tables that are predicted."""
    every = rows()
    zero_bubble = [row for row in every if row["paper"] == "Zero Bubble Table 4"]
    of = [row for row in zero_bubble if not row["unit"].startswith("GB")]
    key = "model", "schedule", "microbatches"
    star = next(row for row in of if tuple(row[k] for k in key) == ZERO_BUBBLE_FITTED)
    yield Table("Zero Bubble Table 4, rates", of, gpt.zero_bubble, star)
    held = [row for row in zero_bubble if row["unit"].startswith("GB")]
    yield Table("Zero Bubble Table 4, memory", held, gpt.zero_bubble, None)
    of = [row for row in every if row["paper"] == "Megatron SC'21 Table 1"]
    star = next(row for row in of if row["model"] == MEGATRON_FITTED)
    yield Table("Megatron SC'21 Table 1", of, gpt.megatron, star)
    for model in images.MODELS:
        name = f"torchgpipe, speed of {model.split(' ')[0]}"
        own = [r for r in every if r["paper"] == "torchgpipe" and r["model"] == model]
        of = [row for row in own if row["unit"] == "samples/s"]
        yield Table(name, of, images.speed, of[0])
    of = [row for row in every if row["paper"].startswith("GPipe Table") and "48" in row["model"]]
    yield Table("GPipe Tables 2 and 3, Transformer-48", of, gpt.gpipe, None)
    yield Table("torchgpipe, memory", list(memories(every)), in_memory, None)


def in_memory(row: Row, efficiency: float) -> float:
    """GiB of all devices; no efficiency matters."""
    return images.memory(row["model"])


def memories(every: Sequence[Row]) -> Iterator[Row]:
    """torchgpipe's ten models; those of AmoebaNet-D have model and activations apart."""
    for model in images.CUTS:
        own = [row for row in every if row["paper"] == "torchgpipe" and row["model"] == model]
        figures = [row["reported"] for row in own if row["unit"].startswith("GiB")]
        if "out of memory" not in figures:
            yield {"model": model, "reported": str(sum(map(float, figures))), "unit": "GiB"}


def run_of(row: Row) -> str:
    """What a row is of, in words."""
    if "pipeline" not in row:
        return row["model"]
    text = f"{row['model']} {row['schedule']} p={row['pipeline']}"
    return text + (f" m={row['microbatches']}" if row["microbatches"] else "")


def predicted(table: Table) -> Iterator[Found]:
    """The predictions of a table."""
    efficiency = 1.0
    if table.star is not None:
        star = table.star
        efficiency = gpt.fitted(lambda e: table.predict(star, e), float(star["reported"]))
    elif table.name.startswith("GPipe"):
        efficiency = 0.5  # ratios hardly depend on it
    for row in table.rows:
        fitted = f"{efficiency:.3f}" if row is table.star else ""
        value = table.predict(row, efficiency)
        yield Found(table.name, run_of(row), row["unit"], float(row["reported"]), value, fitted)


def write(found: Sequence[Found]) -> None:
    """Write the results."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Found._fields, "error"])
        for each in found:
            numbers = f"{each.published:g}", f"{each.predicted:.4g}"
            writer.writerow([*each[:3], *numbers, each.fitted, f"{each.error:+.1%}"])


def summary(found: Sequence[Found]) -> str:
    """Table → how far predictions are off, without rows that were fitted."""
    table = plain_table()
    for heading in ("table", "rows", "mean error", "median", "worst"):
        table.add_column(heading)
    for name in dict.fromkeys(each.table for each in found):
        off = [abs(each.error) for each in found if each.table == name and not each.fitted]
        table.add_row(
            name, str(len(off)), f"{mean(off):.1%}", f"{median(off):.1%}", f"{max(off):.1%}"
        )
    return table_text(table)


def draw(found: Sequence[Found], path: str) -> None:
    """Predicted over published figures, as a picture; both axes are logarithmic."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for name in dict.fromkeys(each.table for each in found):
        own = [each for each in found if each.table == name and not each.fitted]
        axes.loglog([x.published for x in own], [x.predicted for x in own], ".", label=name)
    ends = [
        min(each.published for each in found) / 1.5,
        max(each.published for each in found) * 1.5,
    ]
    axes.plot(ends, ends, color="black", linewidth=0.5)
    for share in (0.9, 1.1):
        axes.plot(ends, [share * end for end in ends], color="gray", linewidth=0.5, linestyle=":")
    axes.set_xlabel("published")
    axes.set_ylabel("predicted")
    axes.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    help = "tables whose names have this; the results of the others stay"
    parser.add_argument("--only", metavar="TEXT", default="", help=help)
    parser.add_argument("--draw", metavar="FILE", help="draw the results that were written last")
    given = parser.parse_args()
    if given.draw:
        draw(results(), given.draw)
        return 0
    found: list[Found] = []
    for table in tables():
        if given.only in table.name:
            for each in predicted(table):
                found.append(each)
                print(*each[:5], f"{each.error:+.1%}", each.fitted, flush=True)
    if given.only and RESULTS.exists():
        known = results()
        new = {each.table for each in found}
        order = [*dict.fromkeys(each.table for each in (*known, *found))]
        kept = [each for each in known if each.table not in new]
        found = sorted((*kept, *found), key=lambda each: order.index(each.table))
    print(summary(found))
    write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
