"""Compare stages on one GPU with a plain loop over micro-batches and with torchgpipe.

All stages share the GPU, so no speed-up is possible, and the slowdown is the cost of pipelining.
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
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import HOW, Setting, add_dispatch, arguments, read
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
    """Run the benchmark; returns 1 if a row is missing."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--stages", nargs="+", type=int, help=f"by default {STAGES}")
    parser.add_argument("--batch", type=int, help="samples per step; by default the model's own")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", choices=("never", "except_last", "always"), default="never")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="capture stages as CUDA graphs; not in a dry run"
    )
    add_dispatch(parser)
    setting, own = read(parser, given)
    counts = own.stages or ((1, 2) if setting.dry_run else STAGES)
    settings: dict[str, str | int] = {
        "batches": ", ".join(str(workload(n, setting, own.batch).batch) for n in own.models),
        "micro-batches": own.microbatches,
        "schedule": f"{own.schedule}; torchgpipe has its own",
        "launched by": HOW[own.dispatch],
        "CUDA graphs": "captured" if own.cuda_graphs and not setting.dry_run else "none",
        "recomputation": f"{own.recompute} in both pipelines; none in the loop",
        "balance": "the same in both, by the times of forwards",
        "optimizer": "SGD in all three",
        "columns": "samples a second; –: not measured",
    }
    title = "Stages on one GPU beside a plain loop and torchgpipe"
    name = "-".join(
        [
            "stages",
            *([] if tuple(own.models) == NAMES else own.models),
            *([] if own.dispatch == "device" else ["one-thread"]),
            *(["graphs"] if own.cuda_graphs else []),
        ]
    )
    rows = Rows(setting, name, title, settings)
    cells: list[tuple[str, ...]] = []
    heading = ("model", "p", "loop", "fxpipe", "torchgpipe", "over loop", "over torchgpipe")
    rows.grids.append(Grid((*heading, "first step"), cells))
    for model in own.models:
        work = workload(model, setting, own.batch)
        rows.figures.append(Figure(f"{work.name}: parameters", _parameters(work) / 1e6, "million"))
        for count in counts:
            what = f"{work.name}, p={count}"
            row = rows.measure(what, partial(measure, work, count, setting, own))
            if row is None:
                cells.append((work.name, str(count), *["–"] * 6))
            else:
                rows.figures.append(Figure(f"{what}: over the loop", row.pipe / row.loop))
                if row.peer is not None:
                    rows.figures.append(Figure(f"{what}: over torchgpipe", row.pipe / row.peer))
                cells.append((work.name, *_shown(row)))
            rows.publish()
    return rows.end()


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
        extensions=[
            fxpipe.Dispatch(own.dispatch),
            *([fxpipe.CudaGraphs()] if own.cuda_graphs and not setting.dry_run else []),
        ],
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
