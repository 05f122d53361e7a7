"""Stages on one GPU beside the plain loop over micro-batches, and beside torchgpipe.

All stages share the GPU, so that nothing can be won: what is lost is what pipelining itself costs.
Run it with ``python -m benchmarks.gpu.stages``; see the README beside it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fxpipe
from benchmarks.gpu.peer import Peer, installed
from benchmarks.gpu.setting import Setting, arguments, read
from benchmarks.gpu.workloads import NAMES, Workload, balance, begins, layers, workload
from benchmarks.report import Figure, Grid, timed
from examples import plain

STAGES = (1, 2, 4, 8)
MICROBATCHES = 8
SECONDS = 10.0
"""Time for the steps of a row."""

SGD = partial(torch.optim.SGD, lr=1e-4)


class Row(NamedTuple):
    """Samples a second of each, and the seconds until the pipe's first step was done."""

    stages: int
    loop: float
    pipe: float
    peer: float | None
    compiling: float


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a row is missing."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--stages", nargs="+", type=int, help=f"by default {STAGES}")
    parser.add_argument("--batch", type=int, help="samples of a step; each model has its own")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", choices=("never", "except_last", "always"), default="never")
    setting, own = read(parser, given)
    counts = own.stages or ((1, 2) if setting.dry_run else STAGES)
    figures: list[Figure] = []
    cells: list[tuple[str, ...]] = []
    missing = 0
    for name in own.models:
        work = workload(name, setting, own.batch)
        figures.append(Figure(f"{work.name}: parameters", _parameters(work) / 1e6, "million"))
        for count in counts:
            row = setting.row(partial(measure, work, count, setting, own))
            missing += row is None
            if row is None:
                cells.append((work.name, str(count), *["–"] * 6))
                continue
            figures.append(Figure(f"{work.name}, p={count}: over the loop", row.pipe / row.loop))
            if row.peer is not None:
                over = Figure(f"{work.name}, p={count}: over torchgpipe", row.pipe / row.peer)
                figures.append(over)
            cells.append((work.name, *_shown(row)))
        setting.tidy()
    heading = ("model", "p", "loop", "fxpipe", "torchgpipe", "over loop", "over torchgpipe")
    settings: dict[str, str | int] = {
        "batches": ", ".join(str(workload(n, setting, own.batch).batch) for n in own.models),
        "micro-batches": own.microbatches,
        "schedule": f"{own.schedule}; torchgpipe has its own",
        "recomputation": f"{own.recompute} in both pipelines; none in the loop",
        "balance": "the same in both, by the times of forwards",
        "optimizer": "SGD in all three",
        "columns": "samples a second; –: no memory or no time was left",
    }
    title = "Stages on one GPU beside a plain loop and torchgpipe"
    grid = Grid((*heading, "first step"), cells)
    name = "-".join(["stages", *([] if tuple(own.models) == NAMES else own.models)])
    setting.publish(name, title, settings, figures, [grid])
    return 1 if missing else 0


def measure(work: Workload, count: int, setting: Setting, own: Any) -> Row:
    """Train three copies of a model, a step of each in turn."""
    single = work.model().to(setting.device)
    x, y = (value.to(setting.device) for value in work.draw(work.batch))
    parts = own.microbatches
    part = x[: max(1, len(x) // parts)]
    lengths = balance(single, part, count, setting.synchronize)
    optimizer = SGD(single.parameters())
    steps = {"loop": lambda: plain.step(single, work.loss, optimizer, x, y, parts)}
    if installed():
        peer = Peer(
            copy.deepcopy(single),
            work.loss,
            SGD,
            lengths,
            setting.devices(count),
            parts,
            own.recompute,
        )
        steps["torchgpipe"] = lambda: peer.step(x, y)
    model = copy.deepcopy(single)
    with fxpipe.compile(
        model,
        setting.devices(count),
        schedule=own.schedule,
        microbatches=parts,
        loss=work.loss,
        optimizer=SGD,
        recompute=own.recompute,
        partition=begins(layers(model), lengths),
    ) as pipe:

        def first() -> None:
            pipe.step(x, target=y)
            setting.synchronize()

        _, compiling = timed(first)
        steps["fxpipe"] = lambda: pipe.step(x, target=y)
        took = setting.seconds(steps, SECONDS)
    rate = {name: work.batch / seconds for name, seconds in took.items()}
    return Row(count, rate["loop"], rate["fxpipe"], rate.get("torchgpipe"), compiling)


def _parameters(work: Workload) -> int:
    return sum(parameter.numel() for parameter in work.model().parameters())


def _shown(row: Row) -> tuple[str, ...]:
    peer = "–" if row.peer is None else f"{row.peer:.4g}"
    ahead = "–" if row.peer is None else f"{row.pipe / row.peer:.3f}"
    over = f"{row.pipe / row.loop:.3f}"
    rates = f"{row.loop:.4g}", f"{row.pipe:.4g}"
    return (str(row.stages), *rates, peer, over, ahead, f"{row.compiling:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
