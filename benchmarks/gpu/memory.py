"""Compare predicted with measured memory: GPipe, 1F1B and 2BW, with each mode of recomputation.

All stages share one GPU, so the comparison is of what all devices hold together: the peak of their
summed predicted memory over simulated time, and the peak of torch's allocator in a step. The batch
stays on the host, and each micro-batch is copied when it is loaded, as the prediction assumes.
Run it with ``python -m benchmarks.gpu.memory``; see the README beside it.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import fxpipe
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import Setting, arguments, read
from benchmarks.gpu.workloads import NAMES, Workload, workload
from benchmarks.report import Figure, Grid
from fxpipe.extensions.simulator import Simulation

SCHEDULES = ("gpipe", "1f1b", "2bw")
MODES = ("never", "except_last", "always")
STEADY = 3
"""Steps before the measured ones: what is allocated once is there."""

STEPS = 4
"""Steps that are measured, and the flush after them: under 2BW a step returns before it is
launched, and the devices hold the most while batches overlap."""

Adam = partial(torch.optim.Adam, lr=1e-4)


class Row(NamedTuple):
    """Bytes: the sum over time at its peak, the sum of the devices' peaks, and the allocator's."""

    predicted: int
    peaks: int
    measured: int


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a row is missing."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["unet", "gpt2"])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--stages", type=int, help="by default 4, in a dry run 2")
    parser.add_argument("--microbatches", type=int, help="by default 8, in a dry run 4")
    parser.add_argument("--batch", type=int, help="samples per step; by default the model's own")
    setting, own = read(parser, given)
    stages = own.stages or (2 if setting.dry_run else 4)
    parts = own.microbatches or (4 if setting.dry_run else 8)
    settings: dict[str, str | int] = {
        "batches": ", ".join(str(workload(n, setting, own.batch).batch) for n in own.models),
        "stages": f"{stages}, all on one device",
        "micro-batches": parts,
        "optimizer": "Adam",
        "measured": f"the allocator's peak in {STEPS} steps and their flush, less what was there "
        "before the model",
        "predicted": f"of all devices together, at the worst moment of {STEPS} simulated steps",
    }
    heads = ("model, schedule", "predicted", "sum of the devices' peaks", "measured", "error")
    name = "-".join(["memory", *own.models])
    rows = Rows(setting, name, "Memory, predicted and measured", settings)
    cells: list[tuple[str, ...]] = []
    rows.grids.append(Grid(heads, cells))
    for model, schedule, mode in product(own.models, own.schedules, own.modes):
        work = workload(model, setting, own.batch)
        what = f"{work.name}, {schedule}, recompute {mode}"
        row = rows.measure(what, partial(measure, work, schedule, mode, stages, parts, setting))
        if row is None:
            cells.append((what, "–", "–", "–", "–"))
        else:
            error = row.predicted / row.measured - 1 if row.measured else None
            if error is not None:
                rows.figures.append(Figure(f"{what}: predicted above measured", 100 * error, "%"))
            cells.append((what, *map(_mebibytes, row), _percent(error)))
        rows.publish()
    return rows.end()


def measure(
    work: Workload, schedule: str, mode: Any, stages: int, parts: int, setting: Setting
) -> Row:
    torch.manual_seed(0)
    before = setting.held()
    x, y = work.draw(work.batch)
    with fxpipe.compile(
        work.model().to(setting.device),
        setting.devices(stages),
        schedule=schedule,
        microbatches=parts,
        loss=work.loss,
        optimizer=Adam,
        recompute=mode,
    ) as pipe:

        def train(steps: int) -> None:
            for _ in range(steps):
                pipe.step(x, target=y)
            pipe.flush()

        train(STEADY)
        setting.tidy()
        measured = setting.peak(partial(train, STEPS)) - before
        simulation = pipe.simulate(steps=STEPS)
        peaks = sum(memory.peak for memory in simulation.memory)
        return Row(together(simulation), peaks, measured)


def together(simulation: Simulation) -> int:
    """The most bytes that all devices hold at one time.

    Where a device runs several instructions at the same time, the last of them counts: what one
    holds for no time at all cannot be there together with what another device holds then.
    """

    def changes(device: int) -> Iterator[tuple[float, int, int]]:
        starts = simulation.events.starts[device]
        levels = simulation.memory[device].levels
        for index, (time, level) in enumerate(zip(starts, levels, strict=True)):
            if index + 1 == len(starts) or starts[index + 1] > time:
                yield time, device, level

    now = [memory.resting for memory in simulation.memory]
    most = sum(now)
    merged = list(heapq.merge(*map(changes, range(simulation.devices))))
    for index, (time, device, level) in enumerate(merged):
        now[device] = level
        if index + 1 == len(merged) or merged[index + 1][0] > time:
            most = max(most, sum(now))
    return most


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size else "–"


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{100 * error:+.2f} %"


if __name__ == "__main__":
    sys.exit(main())
