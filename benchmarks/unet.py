"""Time a U-Net over two CPU devices and a plain loop on one thread, one step of each in turn.

Run it with ``python -m benchmarks.unet`` on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

import torch
from rich.progress import track
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report, spread, timed
from examples import plain
from examples.unet import UNet

DEVICES = ("cpu", "cpu")
MICROBATCHES = 8
SHAPE = (32, 3, 64, 64)
WARM_UP = 3


def main() -> int:
    """Run the benchmark; returns 1 if the losses differ."""
    parser = argparse.ArgumentParser(description="Time a U-Net over two CPU devices.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--schedule", default="1f1b")
    arguments = parser.parse_args()
    machine = describe()

    torch.manual_seed(0)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    model, single = UNet(depth=3), UNet(depth=3)
    single.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(single.parameters())
    torch.set_num_threads(len(DEVICES))  # one for each device
    pipelined: list[float] = []
    alone: list[float] = []
    same = True
    with fxpipe.compile(
        model,
        DEVICES,
        schedule=arguments.schedule,
        microbatches=MICROBATCHES,
        loss=mse_loss,
        optimizer=torch.optim.Adam,
    ) as pipe:
        for _ in track(range(WARM_UP + arguments.rounds), "a step of each in turn"):
            one, seconds = timed(lambda: pipe.step(x, target=y))
            pipelined.append(seconds)
            with plain.one_thread():
                other, seconds = timed(
                    lambda: plain.step(single, mse_loss, optimizer, x, y, MICROBATCHES)
                )
            alone.append(seconds)
            same = same and torch.equal(one, other)
        costs = [stage.costs for stage in pipe.plan.stages]
    first, pipelined, alone = pipelined[0], pipelined[WARM_UP:], alone[WARM_UP:]
    work = [c.forward + c.backward for c in costs if c is not None]
    figures = [
        *spread("pipeline", pipelined),
        *spread("plain loop, one thread", alone),
        Figure("ratio of the medians", median(alone) / median(pipelined)),
        Figure("ideal ratio, stages of the measured work", ideal(work)),
        Figure("ideal ratio, stages of equal work", ideal([1.0] * len(DEVICES))),
        Figure("compile time, with the first step", first, "s"),
        Figure("losses", "equal bit for bit" if same else "different"),
    ]
    settings = {
        "model": "examples.unet.UNet(channels=3, base=16, depth=3), Adam, mean squared error",
        "batch": "×".join(str(size) for size in SHAPE),
        "micro-batches": MICROBATCHES,
        "devices": ", ".join(DEVICES),
        "schedule": arguments.schedule,
        "rounds": arguments.rounds,
    }
    Report("unet", "U-Net, two CPU devices beside one thread", settings, figures, machine).publish()
    return 0 if same else 1


def ideal(work: Sequence[float]) -> float:
    """All work, over the first micro-batch's way and the longest stage's time for the rest."""
    return MICROBATCHES * sum(work) / (sum(work) + (MICROBATCHES - 1) * max(work))


if __name__ == "__main__":
    sys.exit(main())
