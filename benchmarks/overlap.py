"""Compare PipeDream-2BW with 1F1B: idle time and speed on virtual devices, and on a real U-Net.

On virtual devices the real worker threads and interpreter run a model whose tasks all take the same
time, most of it asleep, so that any number of devices fits on one processor.

Run it with ``python -m benchmarks.overlap`` on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report, timed
from examples.unet import UNet

TASK = 0.04
"""Seconds of a forward and of a backward on a virtual device."""

BATCHES = 4
"""Batches of a measurement on virtual devices: so few that the bubble exceeds all overheads."""

UNET_BATCH = (32, 3, 64, 64)
UNET_BLOCK = 5
"""The number of steps of one schedule before the other takes its turn."""


def lengthen(kernel: Any, buckets: Sequence[tuple[int, ...]] = ()) -> None:
    """Make a stage's forward and backward sleep until they have taken as long as a task; each
    bucket of gradients takes an equal part of that."""

    def slow(run: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any) -> Any:
            parted = bool(args) and args[0] in ("B", "W")
            share = 1 / len(buckets) if parted else 1
            end = time.perf_counter() + share * TASK
            made = run(*args)
            time.sleep(max(end - time.perf_counter(), 0))
            return made

        return slowly

    kernel.forward, kernel.backward = slow(kernel.forward), slow(kernel.backward)
    kernel.partial_backward = slow(kernel.partial_backward)


def virtual(devices: int, schedule: str) -> fxpipe.Pipeline:
    """A pipe of tasks of one length, with as many micro-batches as devices."""
    pipe = fxpipe.compile(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(devices))),
        ["cpu"] * devices,
        schedule=schedule,
        microbatches=devices,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        partition=[str(index) for index in range(1, devices)],
        extensions=[fxpipe.Dispatch("device")],  # a thread each: their tasks sleep
        example=((torch.rand(devices, 4),), {"target": torch.rand(devices, 4)}),
    )
    for stage in pipe.plan.stages:
        lengthen(stage.kernel)
    return pipe


def on_virtual_devices(devices: int, rounds: int) -> list[str]:
    """A row of the table: idle time against its formula, speed against 1F1B and its ideal."""
    x, y = torch.rand(devices, 4), torch.rand(devices, 4)
    idle: list[float] = []
    flushed: list[float] = []
    overlapped: list[float] = []
    with virtual(devices, "2bw") as pipe, virtual(devices, "1f1b") as other:
        for each in (pipe, other):  # the first run of a kernel is slow
            each.step(x, target=y)
            each.flush()
        for _ in range(rounds):
            made = pipe.profile(x, target=y, steps=BATCHES)
            idle.append(1 - sum(made.busy) / (devices * made.makespan))
            flushed.append(timed(lambda: other.step(x, target=y))[1])
            flushed.append(timed(lambda: other.step(x, target=y))[1])
            pipe.step(x, target=y)  # fills the pipeline
            overlapped += [timed(lambda: pipe.step(x, target=y))[1] for _ in range(BATCHES)]
            pipe.flush()
    formula = (devices - 1) / (devices * BATCHES + devices - 1)
    speed, ideal = median(flushed) / median(overlapped), (2 * devices - 1) / devices
    return [
        str(devices),
        f"{median(idle):.4f}",
        f"{formula:.4f}",
        f"{median(idle) / formula:.3f}",
        f"{speed:.3f}",
        f"{ideal:.3f}",
        f"{speed / ideal:.3f}",
    ]


def on_the_unet(microbatches: int, rounds: int) -> list[str]:
    """A row of the table: steps a second of both schedules, in turn, and the ideal."""
    torch.manual_seed(0)
    x, y = torch.rand(UNET_BATCH), torch.rand(UNET_BATCH)
    seconds: dict[str, list[float]] = {"1f1b": [], "2bw": []}
    pipes = {
        schedule: fxpipe.compile(
            UNet(depth=3),
            ["cpu", "cpu"],
            schedule=schedule,
            microbatches=microbatches,
            loss=mse_loss,
            optimizer=torch.optim.Adam,
        )
        for schedule in seconds
    }
    for pipe in pipes.values():
        pipe.step(x, target=y)
        pipe.flush()
    costs = [stage.costs for stage in pipes["1f1b"].plan.stages]
    work = [c.forward + c.backward for c in costs if c is not None]
    for _ in track(range(rounds), f"U-Net, {microbatches} micro-batches"):
        for schedule, pipe in pipes.items():
            pipe.step(x, target=y)  # fills the pipeline
            start = time.perf_counter()
            for _ in range(UNET_BLOCK):
                pipe.step(x, target=y)
            seconds[schedule].append((time.perf_counter() - start) / UNET_BLOCK)
            pipe.flush()
    for pipe in pipes.values():
        pipe.close()
    plain, overlapped = (median(seconds[schedule]) for schedule in ("1f1b", "2bw"))
    return [
        str(microbatches),
        f"{1 / plain:.3f}",
        f"{1 / overlapped:.3f}",
        f"{plain / overlapped:.3f}",
        f"{ideal(work, microbatches):.3f}",
        f"{ideal([1.0, 1.0], microbatches):.3f}",
    ]


def ideal(work: Sequence[float], microbatches: int) -> float:
    """How many times faster steps without a flush are, for stages of such work a micro-batch."""
    with_flush = sum(work) + (microbatches - 1) * max(work)
    return with_flush / (microbatches * max(work))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time steps that overlap without a flush.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds, machine = parser.parse_args().rounds, describe()
    torch.set_num_threads(2)  # one for each device of the U-Net
    exact = [on_virtual_devices(p, rounds) for p in track((2, 4, 8), "virtual devices")]
    unet = [on_the_unet(m, rounds) for m in (2, 8)]
    grids = [
        Grid(
            ("devices", "idle", "(p−1)/(mT+p−1)", "ratio", "2BW over 1F1B", "(2p−1)/p", "share"),
            exact,
        ),
        Grid(
            (
                "U-Net, micro-batches",
                "1F1B, steps a second",
                "2BW, steps a second",
                "2BW over 1F1B",
                "ideal, measured work",
                "ideal, equal work",
            ),
            unet,
        ),
    ]
    figures = [
        Figure("idle time, furthest from its formula", worst([float(row[3]) for row in exact])),
        Figure(
            "least share of the ideal speed on virtual devices", min(float(r[6]) for r in exact)
        ),
    ]
    settings = {
        "virtual devices": f"m = p, T = {BATCHES}, forward and backward of {1e3 * TASK:g} ms each",
        "U-Net": "examples.unet.UNet(channels=3, base=16, depth=3), Adam, two CPU devices",
        "batch": "×".join(str(size) for size in UNET_BATCH),
        "rounds": rounds,
    }
    title = "Steps without a flush: PipeDream-2BW beside 1F1B"
    Report("overlap", title, settings, figures, machine, grids).publish()
    return 0


def worst(ratios: Sequence[float]) -> float:
    """The ratio that is furthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


if __name__ == "__main__":
    sys.exit(main())
