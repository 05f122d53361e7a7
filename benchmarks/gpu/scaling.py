"""Reproduce the speed-up tables of GPipe and torchgpipe, with one GPU as 1, 2, 4 and 8 devices.

The GPU is split once into as many equal groups of multiprocessors as the largest pipeline has
devices; smaller pipelines leave the others idle. The batch is the same in every cell.
Run it with ``python -m benchmarks.gpu.scaling``; see the README beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

import fxpipe
from benchmarks.gpu.groups import Groups, split
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import HOW, Setting, add_dispatch, arguments, read
from benchmarks.gpu.workloads import NAMES, Workload, workload
from benchmarks.report import Figure, Grid

DEVICES = (1, 2, 4, 8)
MICROBATCHES = (1, 4, 32)
SECONDS = 8.0
"""Time for the steps of a cell."""

TITLE = "One GPU split into virtual devices"

SGD = partial(torch.optim.SGD, lr=1e-4)
Cells = dict[tuple[int, int], float | None]
"""Micro-batches and devices → samples a second; None where it is not measured."""


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a cell is missing, or the GPU cannot be split."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["unet", "amoebanet"])
    parser.add_argument("--devices", nargs="+", type=int, help=f"by default {DEVICES}")
    parser.add_argument("--microbatches", nargs="+", type=int, help=f"by default {MICROBATCHES}")
    parser.add_argument("--batch", type=int, help="samples per step; by default the model's own")
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--recompute", choices=("never", "except_last", "always"), default="never")
    add_dispatch(parser)
    setting, own = read(parser, given)
    counts = sorted(own.devices or ((1, 2) if setting.dry_run else DEVICES))
    parts = sorted(own.microbatches or ((1, 4) if setting.dry_run else MICROBATCHES))
    name = "-".join(["scaling", *own.models])
    try:
        groups = split(setting, counts[-1])
    except Exception as error:  # whatever the driver's bindings raise
        rows = Rows(setting, name, TITLE, {})
        rows.lose("groups of multiprocessors", error)
        return rows.end()
    settings: dict[str, str | int] = {
        "batches": ", ".join(str(workload(n, setting, own.batch).batch) for n in own.models),
        "groups": f"{counts[-1]} of {groups.multiprocessors} multiprocessors, {groups.how}",
        "schedule": own.schedule,
        "launched by": HOW[own.dispatch],
        "recomputation": own.recompute,
        "balance": "fxpipe's own",
        "cells": "–: not measured",
    }
    rows = Rows(setting, name, TITLE, settings)
    for model in own.models:
        work = workload(model, setting, own.batch)
        before = list(rows.grids)
        for cells in fill(work, counts, parts, groups, setting, own, rows):
            rows.grids = before + tables(work, cells, counts, parts)
            rows.publish()
        most, last = parts[-1], counts[-1]
        found, one = cells[most, last], cells[most, counts[0]]
        if found and one:
            told = f"{work.name}: n={last}, m={most} over n={counts[0]}, m={most}"
            rows.figures += [
                Figure(told, found / one),
                Figure(f"{told}, ideal", ideal(last, most) / ideal(counts[0], most)),
            ]
    return rows.end()


def fill(
    work: Workload,
    counts: Sequence[int],
    parts: Sequence[int],
    groups: Groups,
    setting: Setting,
    own: Any,
    rows: Rows,
) -> Iterator[Cells]:
    """Measure every cell, those with the most micro-batches first: the targets are among them.

    Yields:
        The cells, after each that is filled.
    """
    cells: Cells = dict.fromkeys(product(parts, counts))
    for microbatches in reversed(parts):
        for count in (counts[0], *reversed(counts[1:])):
            devices = groups.devices[:count]
            cells[microbatches, count] = rows.measure(
                f"{work.name}: n={count}, m={microbatches}",
                partial(rate, work, devices, microbatches, setting, own),
            )
            yield cells


def rate(
    work: Workload,
    devices: Sequence[Any],
    microbatches: int,
    setting: Setting,
    own: Any,
) -> float:
    """Samples a second."""
    torch.manual_seed(0)
    x, y = (value.to(setting.device) for value in work.draw(work.batch))
    with fxpipe.compile(
        work.model().to(setting.device),
        devices,
        schedule=own.schedule,
        extensions=[fxpipe.Dispatch(own.dispatch)],
        microbatches=microbatches,
        loss=work.loss,
        optimizer=SGD,
        recompute=own.recompute,
    ) as pipe:
        took = setting.seconds({"step": lambda: pipe.step(x, target=y)}, SECONDS)
    return work.batch / took["step"]


def tables(work: Workload, cells: Cells, counts: Sequence[int], parts: Sequence[int]) -> list[Grid]:
    """Samples a second, and these over the first column and over the first cell of the papers'
    tables, which is two devices with one micro-batch."""
    heads = [f"n={count}" for count in counts]

    def table(what: str, over: Any) -> Grid:
        rows = [(f"m={m}", *(_ratio(cells[m, n], over(m, n)) for n in counts)) for m in parts]
        return Grid((f"{work.name}: {what}", *heads), rows)

    found = [
        table("samples a second", lambda m, n: 1.0),
        table("over one device", lambda m, n: cells[m, counts[0]]),
    ]
    first = (parts[0], 2)
    if first in cells:
        found.append(table(f"over n=2, m={parts[0]}", lambda m, n: cells[first]))
    rows = [(f"m={m}", *(f"{ideal(n, m):.3f}" for n in counts)) for m in parts]
    return [*found, Grid(("ideal: m n / (m + n − 1)", *heads), rows)]


def ideal(devices: int, microbatches: int) -> float:
    """How often as fast as one device so many equal ones are, with free communication."""
    return microbatches * devices / (microbatches + devices - 1)


def _ratio(rate: float | None, over: float | None) -> str:
    return "–" if rate is None or over is None else f"{rate / over:.4g}"


if __name__ == "__main__":
    sys.exit(main())
