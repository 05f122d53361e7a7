"""Train every model under every schedule and number of stages beside a plain loop.

Run it with ``python -m benchmarks.models``; it takes some minutes. With ``--ranks 2 4`` so many
processes are beside as many devices of one process instead.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from itertools import product
from statistics import median
from time import process_time

import torch
from rich.progress import track

import fxpipe.schedules
from benchmarks.machine import Machine, describe
from benchmarks.models import others, own, ranks
from benchmarks.models.cases import Case
from benchmarks.models.exact import MICROBATCHES, ROWS, STEPS, Run, run, split
from benchmarks.report import Figure, Grid, Report
from examples.plain import one_thread
from fxpipe.ir.recipe import RECIPES

STAGES = (2, 3, 4)
WANTED = ("gpipe", "1f1b", "zb-h1")


def main() -> int:
    """Returns the exit status: 1 where a pipeline and the loop differ."""
    assert fxpipe.schedules  # importing it has registered the library's schedules
    parser = argparse.ArgumentParser(description="Train many models beside a plain loop.")
    parser.add_argument("--schedules", nargs="+", help="by default some that differ much")
    parser.add_argument("--stages", nargs="+", type=int, default=list(STAGES))
    parser.add_argument("--ranks", nargs="+", type=int, help="processes beside one process")
    parser.add_argument("--models", nargs="+", help="parts of their names; all by default")
    arguments = parser.parse_args()
    machine = describe()
    cases = [
        case
        for case in (*others.CASES, *own.CASES)
        if not arguments.models or any(part in case.name for part in arguments.models)
    ]
    torch.set_num_threads(1)
    if arguments.ranks:
        return over_ranks(cases, arguments.schedules or ranks.SCHEDULES, arguments.ranks, machine)
    known = [name for name in WANTED if name in RECIPES]
    settings = list(product(arguments.schedules or known, arguments.stages))
    runs: list[list[Run]] = []
    exporting: list[float] = []
    run(cases[0], *settings[0])  # what is imported at first
    for case in track(cases, "models"):
        alone, beside = list[float](), list[Run]()
        for setting in settings:
            alone.append(export_seconds(case))
            beside.append(run(case, *setting))
        exporting.append(median(alone))
        runs.append(beside)
    faults = [name for row in runs for each in row for name in each.differing]
    compiling = [median(each.compiling for each in row) for row in runs]
    ratios = [a / b for a, b in zip(compiling, exporting, strict=True)]
    figures = [
        Figure("models", len(cases)),
        Figure("gradients, losses and buffers", "differ" if faults else "equal bit for bit"),
        Figure("compile time over torch.export's own, median", median(ratios)),
        Figure("the same, greatest", max(ratios)),
    ]
    headings = [f"{schedule}, {stages}" for schedule, stages in settings]
    grids = [
        Grid(
            ("schedule, stages", *headings),
            [(case.name, *map(_shown, row)) for case, row in zip(cases, runs, strict=True)],
        ),
        Grid(
            ("compile time", "fxpipe", "torch.export", "ratio"),
            [
                (case.name, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.1f}")
                for case, a, b in zip(cases, compiling, exporting, strict=True)
            ],
        ),
    ]
    told = {
        "batch": f"{ROWS} in {MICROBATCHES} micro-batches, {STEPS} steps",
        "compile time": "processor seconds until the pipe is ready for its first step, median",
        "torch.export": "the same of torch.export.export of the model alone, in turns",
    }
    Report("models", "Models beside a plain loop", told, figures, machine, grids).publish()
    return 1 if faults else 0


def over_ranks(
    cases: Sequence[Case], schedules: Sequence[str], sizes: Sequence[int], machine: Machine
) -> int:
    """The same for ranks: 1 where they and the devices of one process differ."""
    settings = [ranks.Setting(*each) for each in product([case.name for case in cases], schedules)]
    found = {
        (*setting, size): compared
        for size in sizes
        for setting, compared in zip(
            settings,
            track(ranks.compare(settings, size), f"{size} ranks", len(settings)),
            strict=True,
        )
    }
    columns = list(product(schedules, sizes))
    heading = ("schedule, ranks", *(f"{schedule}, {size}" for schedule, size in columns))
    rows = [(c.name, *(_beside(found[c.name, *column]) for column in columns)) for c in cases]
    faults = {key: each.differing for key, each in found.items() if each.differing}
    refused = {key: each.refused for key, each in found.items() if each.refused}
    figures = [
        Figure("models", len(cases)),
        Figure(
            "losses, gradients, buffers and weights", "differ" if faults else "equal bit for bit"
        ),
        *(Figure(" ".join(map(str, key)), "; ".join(each[:3])) for key, each in faults.items()),
        *(Figure(" ".join(map(str, key)), f"refused: {why}") for key, why in refused.items()),
    ]
    told = {
        "batch": f"{ROWS} in {MICROBATCHES} micro-batches, {ranks.STEPS} steps with AdamW",
        "beside": "the pipe over as many devices of one process",
    }
    title = "Models over ranks beside one process"
    Report("models-ranks", title, told, figures, machine, [Grid(heading, rows)]).publish()
    return 1 if faults else 0


def export_seconds(case: Case) -> float:
    """The processor seconds that PyTorch alone takes to trace the model on one micro-batch."""
    torch.manual_seed(0)
    model, batch = case.model(), split(case.batch(ROWS))[0]
    # objects in a model's output are more than torch.export takes
    hook = model.register_forward_hook(lambda module, args, output: _tensors(output))
    start = process_time()
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.export(model, batch.args, dict(batch.kwargs), strict=False)
    hook.remove()
    return process_time() - start


def _tensors(output: object) -> object:
    values: Sequence[object] = [output]
    if isinstance(output, dict):
        values = list(output.values())
    elif isinstance(output, tuple):
        values = output
    return [value for value in values if isinstance(value, torch.Tensor)]


def _shown(run: Run) -> str:
    return _told(run.differing)


def _beside(compared: ranks.Compared) -> str:
    return "refused" if compared.refused else _told(compared.differing)


def _told(differing: Sequence[str]) -> str:
    return f"{len(differing)} differ" if differing else "equal"


if __name__ == "__main__":
    sys.exit(main())
