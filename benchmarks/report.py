"""Writes the results of a benchmark as Markdown and JSON, and prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeVar

from rich.table import Table

from benchmarks.machine import Machine
from fxpipe.extensions.tables import plain_table, table_text

RESULTS = Path(__file__).parent / "results"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Figure:
    """A measured number, a number to compare it with, or a remark."""

    name: str
    value: float | str
    unit: str = ""

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return self.value
        return f"{self.value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Grid:
    """A table of more than names and values.

    Attributes:
        headings: of the columns.
        rows: as many cells each.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return [f"| {' | '.join(cells)} |" for cells in lines]

    def table(self) -> Table:
        return _table(self.headings, self.rows)


_PROSE = 40
"""Cells with more characters are wrapped on the terminal."""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int = 1) -> Table:
    """A table for the terminal; the first column is flush left."""
    table = plain_table(gap)
    table.show_header = any(headings)
    for at, heading in enumerate(headings):
        width = max(len(cells[at]) for cells in [headings, *rows])
        ratio = 1 if width > _PROSE else None
        table.add_column(heading, justify="right" if at and ratio is None else "left", ratio=ratio)
    for cells in rows:
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class Report:
    """What one benchmark found.

    Attributes:
        name: of its files.
        title: a line for people.
        settings: what was run, in words and numbers.
        figures: what came out.
        machine: where.
        grids: tables that follow the figures.
        pictures: files beside the report's own.
        samples: every single measurement, by name, for programs alone.
    """

    name: str
    title: str
    settings: Mapping[str, str | int]
    figures: Sequence[Figure]
    machine: Machine
    grids: Sequence[Grid] = ()
    pictures: Sequence[str] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def markdown(self) -> str:
        rows = [f"| {figure.name} | {figure} |" for figure in self.figures]
        settings = [f"- {name}: {value}" for name, value in self.settings.items()]
        machine = [f"- {name}: {value}" for name, value in asdict(self.machine).items()]
        lines = [f"# {self.title}", "", "| | |", "|---|---|", *rows]
        for grid in self.grids:
            lines += ["", *grid.markdown()]
        for picture in self.pictures:
            lines += ["", f"![{self.title}]({picture})"]
        lines += ["", "What ran:", "", *settings, "", "On:", "", *machine]
        return "\n".join(lines) + "\n"

    def publish(self, folder: Path = RESULTS) -> None:
        """Print it, and write it as Markdown and as JSON."""
        figures = _table(("", ""), [(figure.name, str(figure)) for figure in self.figures], gap=2)
        print(self.title, table_text(figures), sep="\n")
        for grid in self.grids:
            print("", table_text(grid.table()), sep="\n")
        path = self.write(folder)
        print(f"Written to {path} and {path.with_suffix('.json').name}")

    def write(self, folder: Path) -> Path:
        """Write it as Markdown, whose path it returns, and as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}-{self.machine.date}.md"
        path.write_text(self.markdown())
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """What it returns, and the seconds that it took."""
    start = perf_counter()
    result = function()
    return result, perf_counter() - start


def spread(name: str, seconds: Sequence[float]) -> list[Figure]:
    """Median, and first and last decile, in milliseconds."""
    deciles = quantiles(seconds, n=10, method="inclusive")
    return [
        Figure(f"{name}, median", 1e3 * median(seconds), "ms"),
        Figure(f"{name}, first decile", 1e3 * deciles[0], "ms"),
        Figure(f"{name}, last decile", 1e3 * deciles[-1], "ms"),
    ]


def finished(kind: type[Result], path: Path) -> dict[str, Result]:
    """The rows that a long benchmark has stored in a file, a line each, by their names."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {fields["name"]: kind(**fields) for fields in map(json.loads, lines)}


def store(row: Any, path: Path) -> None:
    """Store one more row, an instance of a dataclass."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")
