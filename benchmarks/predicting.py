"""Compare predicted with measured step times and memory over two CPU devices.

The rows combine five models with schedules, numbers of micro-batches, recomputation and cuts. A
trial of a row compiles a new pipe, predicts and measures its step, and predicts it again with the
times of a profile. All rows take turns, several times, so that a machine whose speed changes for a
while spoils few trials of each. One more pipe of each row counts the bytes that devices hold.
Finally ``schedule="auto"`` chooses for three of the models, and its steps take turns with those of
the fastest measured row.

Run it with ``python -m benchmarks.predicting`` on an idle machine; ``--quick`` runs every seventh
row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from benchmarks.counted import counted
from benchmarks.machine import describe
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.resnet import ResNet
from benchmarks.report import Figure, Grid, Report, timed
from examples.unet import UNet

DEVICES = ("cpu", "cpu")
MICROBATCHES = (2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
RECOMPUTE = ("never", "always")
CHOOSING = ("U-Net", "GPT-2", "ResNet")
QUICK = 7
WARM_UP = 2
COUNTED = 2
NEAR = 0.1


@dataclass(frozen=True)
class Case:
    """A model with its batch.

    Attributes:
        build: makes the model.
        batch: makes inputs and targets.
        loss: of outputs and targets.
        early: a submodule at which the second stage begins in a cut that is far from equal.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    early: str


def token_loss(scores: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), words.flatten())


def transformer() -> nn.Module:
    layers = (
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(6)
    )
    return nn.Sequential(*layers)


def tiny() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


CASES = {
    "U-Net": Case(
        lambda: UNet(depth=3),
        lambda: (torch.rand(32, 3, 64, 64), torch.rand(32, 3, 64, 64)),
        mse_loss,
        "",
    ),
    "GPT-2": Case(
        lambda: GPT2(1000, 64, 6, 128, 4),
        lambda: (torch.randint(1000, (16, 64)), torch.randint(1000, (16, 64))),
        token_loss,
        "blocks.2",
    ),
    "ResNet": Case(
        lambda: ResNet((1, 2, 2, 1), 16, 10),
        lambda: (torch.rand(32, 3, 64, 64), torch.randint(10, (32,))),
        cross_entropy,
        "blocks.2",
    ),
    "transformer": Case(
        transformer,
        lambda: (torch.rand(16, 64, 256), torch.rand(16, 64, 256)),
        mse_loss,
        "2",
    ),
    "tiny": Case(tiny, lambda: (torch.rand(16, 16), torch.rand(16, 16)), mse_loss, "1"),
}


@dataclass(frozen=True)
class Trial:
    """The seconds of a step with one pipe.

    Attributes:
        predicted: by the pipe before any step of it was timed.
        measured: the median of several steps.
        corrected: predicted after a profile.
    """

    predicted: float
    measured: float
    corrected: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


Configuration = tuple[str, str, int, str, str]
"""Model, schedule, micro-batches, recompute and cut."""


@dataclass(frozen=True)
class Row:
    """A configuration with its trials, and the medians over these; ``bytes`` is the predicted over
    the counted peak of the device for which this is furthest off."""

    model: str
    schedule: str
    microbatches: int
    recompute: str
    cut: str
    trials: Sequence[Trial]
    bytes: float

    @property
    def predicted(self) -> float:
        return median(trial.predicted for trial in self.trials)

    @property
    def measured(self) -> float:
        return median(trial.measured for trial in self.trials)

    @property
    def ratio(self) -> float:
        return median(trial.ratio for trial in self.trials)

    @property
    def corrected(self) -> float:
        """The ratio after a profile."""
        return median(trial.corrected / trial.measured for trial in self.trials)

    @property
    def name(self) -> str:
        return f"{self.schedule}, m = {self.microbatches}, {self.recompute}, {self.cut}"

    def cells(self) -> list[str]:
        ratios = [trial.ratio for trial in self.trials]
        return [
            self.model,
            self.schedule,
            str(self.microbatches),
            self.recompute,
            self.cut,
            *(f"{1e3 * seconds:.2f}" for seconds in (self.predicted, self.measured)),
            f"{self.ratio:.3f}",
            f"{min(ratios):.3f} – {max(ratios):.3f}",
            f"{self.corrected:.3f}",
            f"{self.bytes:.4f}",
        ]


HEADINGS = (
    *("model", "schedule", "m", "recompute", "cut", "predicted, ms"),
    *("measured, ms", "ratio", "of single trials", "ratio after a profile", "bytes"),
)


def configurations() -> Iterator[Configuration]:
    """The configurations of all rows."""
    for cut, name in product(("balanced", "early"), CASES):
        if cut == "balanced" or CASES[name].early:
            for rest in product(SCHEDULES, MICROBATCHES, RECOMPUTE):
                yield name, *rest, cut


def pipe_of(name: str, cut: str = "balanced", **options: Any) -> fxpipe.Pipeline:
    """A pipe that trains a model, always from the same weights."""
    case = CASES[name]
    torch.manual_seed(0)
    return fxpipe.compile(
        case.build(),
        DEVICES,
        loss=case.loss,
        optimizer=torch.optim.Adam,
        partition=[case.early] if cut == "early" else "auto",
        **options,
    )


def run(configuration: Configuration, steps: int) -> Trial:
    """Predict and measure one configuration."""
    name, schedule, microbatches, recompute, cut = configuration
    x, y = CASES[name].batch()
    with pipe_of(
        name, cut, schedule=schedule, microbatches=microbatches, recompute=recompute
    ) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        predicted = pipe.simulate().step_time
        seconds = median(timed(lambda: pipe.step(x, target=y))[1] for _ in range(steps))
        pipe.profile(x, target=y, steps=2)
        corrected = pipe.simulate().step_time
    return Trial(predicted, seconds, corrected)


def count(configuration: Configuration) -> float:
    """Of the device for which it is furthest off, the predicted over the counted peak."""
    name, schedule, microbatches, recompute, cut = configuration
    x, y = CASES[name].batch()
    with pipe_of(
        name, cut, schedule=schedule, microbatches=microbatches, recompute=recompute
    ) as pipe:
        pipe.prepare(x, target=y)
        with counted(pipe) as devices:
            for step in range(2 * COUNTED):
                if step == COUNTED:
                    for device in devices:
                        device.clear()
                pipe.step(x, target=y)
        pairs = zip(pipe.simulate().memory, devices, strict=True)
        ratios: list[float] = [memory.peak / device.peak for memory, device in pairs]
        return max(ratios, key=_off)


def _off(ratio: float) -> float:
    """How far a ratio is from 1."""
    return abs(ratio - 1)


def choice(name: str, rows: Sequence[Row], steps: int) -> list[Figure]:
    """What ``schedule="auto"`` chooses, and how its steps compare with those of the fastest row,
    run in turn; and the row with the shortest prediction beside the fastest one."""
    best, likely = (min(rows, key=attrgetter(key)) for key in ("measured", "predicted"))
    x, y = CASES[name].batch()
    options = {"microbatches": best.microbatches, "recompute": best.recompute}
    fastest = pipe_of(name, best.cut, schedule=best.schedule, **options)
    with pipe_of(name, schedule="auto") as pipe, fastest as other:
        _, deciding = timed(lambda: pipe.step(x, target=y))
        both = (pipe, other)
        times: list[list[float]] = [[], []]
        for _ in range(WARM_UP + steps):
            for each, own in zip(both, times, strict=True):
                own.append(timed(lambda each=each: each.step(x, target=y))[1])  # type: ignore[misc]
        chosen = f"{pipe.schedule.name}, m = {pipe.schedule.microbatches}"
    ours, theirs = (median(own[WARM_UP:]) for own in times)
    return [
        Figure(f"{name}, choice of auto", f"{chosen} ({1e3 * ours:.1f} ms)"),
        Figure(f"{name}, fastest row", f"{best.name} ({1e3 * theirs:.1f} ms)"),
        Figure(f"{name}, choice of auto, measured over the fastest row", ours / theirs),
        Figure(f"{name}, first step with its choice", deciding, "s"),
        Figure(f"{name}, fastest predicted row", likely.name),
        Figure(
            f"{name}, fastest predicted row, measured over the fastest row",
            likely.measured / best.measured,
        ),
    ]


def summary(rows: Sequence[Row]) -> list[Figure]:
    """How far predictions are off, over all rows and by model."""
    groups = {"all": rows} | {name: [row for row in rows if row.model == name] for name in CASES}
    figures = []
    for name, own in groups.items():
        for word, ratios in (
            ("predicted", [row.ratio for row in own]),
            ("after a profile", [row.corrected for row in own]),
        ):
            off = [100 * _off(ratio) for ratio in ratios]
            if off:
                tail = quantiles(off, n=10, method="inclusive")[-1] if off[1:] else off[0]
                figures += [
                    Figure(f"{name}, {word}, off by, median", median(off), "%"),
                    Figure(f"{name}, {word}, off by, 90th percentile", tail, "%"),
                ]
        figures.append(_near(f"{name}, predicted", own))
    trials = [trial for row in rows for trial in row.trials]
    return [
        *figures,
        _near("single trials, predicted", trials),
        Figure("all, peak memory, off by at most", 100 * max(_off(row.bytes) for row in rows), "%"),
    ]


def _near(name: str, predictions: Sequence[Row] | Sequence[Trial]) -> Figure:
    near = sum(_off(each.ratio) <= NEAR for each in predictions)
    return Figure(f"{name} within {100 * NEAR:.0f} %", f"{near} of {len(predictions)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare predicted with measured steps.")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="run every seventh row, and write no report"
    )
    parser.add_argument("--model", choices=[*CASES], help="run the rows of this model only")
    arguments = parser.parse_args()
    machine = describe()
    torch.set_num_threads(len(DEVICES))  # one for each device
    chosen = [each for each in configurations() if arguments.model in (None, each[0])]
    trials: dict[Configuration, list[Trial]] = {}
    bytes_: dict[Configuration, float] = {}
    start = perf_counter()
    for _ in range(arguments.trials):
        print(*HEADINGS, sep=" | ")
        for each in chosen[:: QUICK if arguments.quick else 1]:
            trials.setdefault(each, []).append(run(each, arguments.steps))
            if each not in bytes_:
                bytes_[each] = count(each)
            print(*Row(*each, trials[each], bytes_[each]).cells(), sep=" | ", flush=True)
    rows = [Row(*each, own, bytes_[each]) for each, own in trials.items()]
    figures = [*summary(rows), Figure("all rows", perf_counter() - start, "s")]
    for name in CHOOSING:
        own = [row for row in rows if row.model == name]
        figures += choice(name, own, arguments.steps) if own else []
    figures.append(Figure("all", perf_counter() - start, "s"))
    if arguments.quick or arguments.model:
        print(*(f"{figure.name}: {figure}" for figure in figures), sep="\n")
        return 0
    settings = {
        "devices": ", ".join(DEVICES),
        "optimizer": "Adam",
        "trials": f"{arguments.trials} of each row, all rows in turn; the medians stand here",
        "measured": f"median of {arguments.steps} steps after {WARM_UP}",
        "bytes": f"predicted over counted peak of {COUNTED} steps after as many, of the device for "
        "which it is furthest off",
        "early": "a cut at a third of the model or before",
    }
    grid = Grid(HEADINGS, [row.cells() for row in rows])
    title = "Predicted beside measured time of a step"
    Report("predicting", title, settings, figures, machine, [grid]).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
