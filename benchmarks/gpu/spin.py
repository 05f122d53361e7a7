"""Compare measured with simulated steps, for kernels of a fixed length on eight virtual devices.

A stage's forward is a kernel that only waits; its backward is two such kernels, for the gradients
of its input and weight. Each takes one GPU thread, so that kernels of all devices run in parallel.
The time of a step beyond the simulation is the cost of dispatch and synchronisation.
Run it with ``python -m benchmarks.gpu.spin``; see the README beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import HOW, Setting, arguments, read
from benchmarks.report import Figure, Grid
from fxpipe.runtime.choice import Dispatches

STAGES_A_DEVICE = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1}
"""The schedules to run."""

WIDTH = 8
SECONDS = 15.0

cycles_per_second = 1.0
"""Of the GPU's clock, once it is calibrated."""


@torch.library.custom_op("fxpipe_benchmarks::spin", mutates_args=())
def spin(x: Tensor, microseconds: int) -> Tensor:
    """A copy, after so long on the device."""
    if x.is_cuda:
        torch.cuda._sleep(int(1e-6 * microseconds * cycles_per_second))
    else:
        time.sleep(1e-6 * microseconds)
    return x.clone()


@spin.register_fake
def _(x: Tensor, microseconds: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxpipe_benchmarks::spin_add", mutates_args=())
def spin_add(x: Tensor, weight: Tensor, microseconds: int) -> Tensor:
    """The sum of both, after so long; backward takes as long for either."""
    waited: Tensor = spin(x, microseconds)
    return waited + weight


@spin_add.register_fake
def _(x: Tensor, weight: Tensor, microseconds: int) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.microseconds = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return spin(gradient, ctx.microseconds), spin(gradient.sum(0), ctx.microseconds), None


spin_add.register_autograd(_backward, setup_context=_keep)


class Wait(nn.Module):
    """One stage's work."""

    def __init__(self, microseconds: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.microseconds = microseconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = spin_add(x, self.weight, self.microseconds)
        return y


def total(output: Tensor) -> Tensor:
    return output.mean()


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a row is missing."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--devices", type=int, help="by default 8, in a dry run 2")
    parser.add_argument("--microbatches", type=int, help="by default 32, in a dry run 4")
    parser.add_argument("--microseconds", type=int, default=2000, help="length of a kernel")
    parser.add_argument("--schedules", nargs="+", choices=STAGES_A_DEVICE, help="by default all")
    parser.add_argument(
        "--dispatch",
        nargs="+",
        choices=get_args(Dispatches),
        help="who launches kernels; by default both",
    )
    setting, own = read(parser, given)
    devices = own.devices or (2 if setting.dry_run else 8)
    microbatches = own.microbatches or (4 if setting.dry_run else 32)
    settings: dict[str, str | int] = {
        "devices": devices,
        "micro-batches": microbatches,
        "kernels": f"one of {own.microseconds} µs for a forward, two for a backward",
        "simulated": "makespan with the kernels' measured length, all else free",
    }
    rows = Rows(setting, "spin", "Kernels of a fixed length on virtual devices", settings)
    length = rows.measure("length of one kernel", partial(calibrate, setting, own.microseconds))
    if length is None:
        return rows.end()
    rows.figures.append(Figure("length of one kernel, measured", 1e6 * length, "µs"))
    cells: list[tuple[str, ...]] = []
    rows.grids.append(Grid(("schedule", "launched by", "simulated", "measured"), cells))
    dispatches: Sequence[Dispatches] = own.dispatch or setting.dispatches
    for schedule, dispatch in product(own.schedules or STAGES_A_DEVICE, dispatches):
        counts = devices, microbatches, own.microseconds
        what = f"{schedule}, {HOW[dispatch]}"
        found = rows.measure(what, partial(run, schedule, dispatch, *counts, length, setting))
        if found is not None:
            wanted, took = found
            rows.figures.append(Figure(f"{what}: measured over simulated", took / wanted))
            seconds = f"{1e3 * wanted:.2f} ms", f"{1e3 * took:.2f} ms"
            cells.append((schedule, HOW[dispatch], *seconds))
        rows.publish()
    return rows.end()


def calibrate(setting: Setting, microseconds: int) -> float:
    """Find the clock's rate, then the seconds that a kernel really takes."""
    global cycles_per_second
    if setting.dry_run:
        return 1e-6 * microseconds
    cycles = 100_000_000
    _on_device(lambda: torch.cuda._sleep(cycles))  # the clock comes up
    cycles_per_second = cycles / _on_device(lambda: torch.cuda._sleep(cycles))
    x = torch.zeros(1, WIDTH, device=setting.device)
    return median(_on_device(lambda: spin(x, microseconds)) for _ in range(50))


def _on_device(launch: Any) -> float:
    """Seconds between two events around what is launched."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    launch()
    after.record()
    after.synchronize()
    seconds: float = 1e-3 * before.elapsed_time(after)
    return seconds


def run(
    schedule: str,
    dispatch: Dispatches,
    devices: int,
    microbatches: int,
    microseconds: int,
    length: float,
    setting: Setting,
) -> tuple[float, float]:
    """The simulated makespan and the median of the measured steps, in seconds."""
    stages = devices * STAGES_A_DEVICE[schedule]
    model = nn.Sequential(*(Wait(microseconds) for _ in range(stages)))
    x = torch.zeros(microbatches, WIDTH, device=setting.device)
    with fxpipe.compile(
        model.to(setting.device),
        setting.devices(devices),
        schedule=schedule,
        extensions=[fxpipe.Dispatch(dispatch)],
        microbatches=microbatches,
        loss=total,
        partition=[str(stage) for stage in range(1, stages)],
    ) as pipe:
        took = setting.seconds({"step": lambda: pipe.step(x)}, SECONDS)["step"]
        costs: dict[str | tuple[str, int], float] = {
            **{"F": length, "B": 2 * length, "I": length, "W": length, "U": 0.0},
            **{("B", 0): length, ("I", 0): 0.0},  # nobody wants the gradient of the batch
        }
        return pipe.simulate(costs).makespan, took


if __name__ == "__main__":
    sys.exit(main())
