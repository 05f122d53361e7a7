"""Measure what delayed gradients cost in loss, for a U-Net and a transformer on real data.

Run it with ``python -m benchmarks.convergence``; it measures losses, not times, and writes the
curves as a picture and a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from benchmarks.curves import draw as curves_picture
from benchmarks.machine import describe
from benchmarks.report import RESULTS, Figure, Grid, Report
from examples import photographs, plain
from examples.unet import UNet

DEVICES = 2
MICROBATCHES = 4
SEEDS = (0, 1, 2)
LAST = 0.1
"""Share of the steps whose mean loss is the final one."""

WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "plain loop": None,
    "1F1B": {"schedule": "1f1b"},
    "2BW": {"schedule": "2bw"},
    "PipeDream": {"schedule": "pipedream"},
}
"""Way to train → what ``fxpipe.compile`` is given; None for a loop on one device."""

Batch = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """The next character from those before it."""

    def __init__(self, characters: int, width: int = 48, blocks: int = 3, length: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        out: Tensor = self.head(x)
        return out


def denoising(seed: int, steps: int) -> tuple[nn.Module, list[Batch]]:
    """A small U-Net, and noisy crops with their noise."""
    generator = torch.Generator().manual_seed(seed)
    sources = photographs.training()
    noisy = [
        photographs.add_noise(photographs.crops(sources, 8, 32, generator), generator)
        for _ in range(steps)
    ]
    return UNet(base=8, depth=2), [(each.image, each.noise) for each in noisy]


def writing(seed: int, steps: int) -> tuple[nn.Module, list[Batch]]:
    """A small transformer, and pieces of what Python's ``help`` says of its topics."""
    text = "".join(topics[name] for name in sorted(topics))
    characters = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([characters[character] for character in text])
    generator = torch.Generator().manual_seed(seed)
    length = 48
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(codes) - length, (8,), generator=generator)
        pieces = torch.stack([codes[start : start + length + 1] for start in starts.tolist()])
        batches.append((pieces[:, :-1], pieces[:, 1:]))
    return Transformer(len(characters)), batches


def guessed(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the next character, in nats."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


TASKS: Mapping[str, tuple[Callable[[int, int], tuple[nn.Module, list[Batch]]], plain.Loss]] = {
    "U-Net": (denoising, mse_loss),
    "transformer": (writing, guessed),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def trained(task: str, way: str, seed: int, steps: int) -> list[float]:
    """The loss of every step."""
    make, loss = TASKS[task]
    torch.manual_seed(seed)
    model, batches = make(seed, steps)
    options = WAYS[way]
    if options is None:
        optimizer = adam(model.parameters())
        with plain.one_thread():  # as a device of the others has, so that sums have one order
            made = [plain.step(model, loss, optimizer, x, y, MICROBATCHES) for x, y in batches]
        return [float(each) for each in made]
    count = 1 if way == "PipeDream" else MICROBATCHES  # which updates after every micro-batch
    given = {"devices": ["cpu"] * DEVICES, "microbatches": count, **options}
    with fxpipe.compile(model, loss=loss, optimizer=adam, **given) as pipe:
        losses = [pipe.step(x, target=y) for x, y in batches]  # read when all are on their way
        return [float(loss) for loss in losses]


def rows(curves: Mapping[str, Sequence[Sequence[float]]], steps: int) -> list[list[str]]:
    """Way → its final loss over the seeds, and how that compares with the first way's."""
    last = max(int(LAST * steps), 1)
    finals = {way: [mean(curve[-last:]) for curve in each] for way, each in curves.items()}
    first = mean(next(iter(finals.values())))
    return [
        [way, f"{mean(each):.5f}", f"{stdev(each):.5f}", f"{mean(each) / first:.4f}"]
        for way, each in finals.items()
    ]


def curve_rows(curves: Mapping[str, Sequence[Sequence[float]]], steps: int) -> list[list[str]]:
    """Every tenth of the run → the mean loss in it of each way, over the seeds."""
    bounds = sorted({round(steps * part / 10) for part in range(11)})
    return [
        [
            f"{start + 1}–{end}",
            *(f"{mean(mean(c[start:end]) for c in each):.5f}" for each in curves.values()),
        ]
        for start, end in pairwise(bounds)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with and without delayed gradients.")
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    machine = describe()
    torch.set_num_threads(DEVICES)
    grids = []
    figures = []
    found: dict[str, dict[str, list[list[float]]]] = {}
    for task in TASKS:
        runs = [(way, seed) for way in WAYS for seed in SEEDS]
        curves = found[task] = {way: [] for way in WAYS}
        for way, seed in track(runs, task):
            curves[way].append(trained(task, way, seed, steps))
        finals = rows(curves, steps)
        grids += [
            Grid((task, "final loss", "spread over seeds", "beside the plain loop"), finals),
            Grid((f"{task}, steps", *WAYS), curve_rows(curves, steps)),
        ]
        figures += [
            Figure(f"{task}: {row[0]} beside the plain loop", float(row[3])) for row in finals
        ]
    settings = {
        "U-Net": "examples.unet.UNet(base=8, depth=2), noise of 8 crops of 32×32 a step",
        "transformer": "3 blocks of width 48, 8 pieces of 48 characters of pydoc_data.topics",
        "optimizer": "Adam, lr=2e-3",
        "devices": DEVICES,
        "micro-batches": f"{MICROBATCHES}; for PipeDream 1, so its updates are as many",
        "steps": steps,
        "seeds": ", ".join(map(str, SEEDS)),
        "final loss": f"mean of the last {LAST:.0%} of the steps",
    }
    title = "Losses with delayed gradients"
    RESULTS.mkdir(parents=True, exist_ok=True)
    picture = RESULTS / f"convergence-{machine.date}.svg"
    curves_picture(found, picture)
    samples = {
        f"{task}, {way}, seed {seed}": runs[index]
        for task, curves in found.items()
        for way, runs in curves.items()
        for index, seed in enumerate(SEEDS)
    }
    Report(
        "convergence", title, settings, figures, machine, grids, [picture.name], samples
    ).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
