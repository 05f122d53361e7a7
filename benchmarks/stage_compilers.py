"""Compare steps of plain stages with steps of stages that inductor has compiled, in turn.

Run it with ``python -m benchmarks.stage_compilers`` on an idle machine. The first run compiles for
minutes; later ones use inductor's cache folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from benchmarks.machine import Machine, describe
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.resnet import ResNet
from benchmarks.peers.case import CASES, sgd
from benchmarks.report import Figure, Report, spread, timed

DEVICES = ("cpu", "cpu")
MICROBATCHES = 8
WARM_UP = 3
COMPILERS: dict[str, list[Any]] = {"as they are": [], "inductor": [fxpipe.Inductor()]}
WORDS = 512


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    """A small one, and 32 texts of 64 tokens."""
    torch.manual_seed(0)
    model = GPT2(words=WORDS, length=64, blocks=4, width=128, heads=4)
    return model, torch.randint(WORDS, (32, 64)), torch.randint(WORDS, (32, 64))


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """One of eight bottlenecks, and 32 images of ten classes."""
    torch.manual_seed(0)
    model = ResNet(blocks=(2, 2, 2, 2), width=32, classes=10)
    return model, torch.randn(32, 3, 64, 64), torch.randint(10, (32,))


def next_tokens(scores: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), tokens.flatten())


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], dict[str, Any]]] = {
    name: (CASES[name].make, {"loss": CASES[name].loss, "optimizer": CASES[name].optimizer})
    for name in ("unet", "transformer")
} | {
    "gpt2": (gpt2, {"loss": next_tokens, "optimizer": sgd}),
    "resnet": (resnet, {"loss": cross_entropy, "optimizer": sgd}),
}


def make(
    name: str, extensions: list[Any], schedule: str
) -> tuple[fxpipe.Pipeline, Tensor, Tensor, float]:
    """A pipe that has trained for a step, its batch and target, and the seconds that took."""
    made, options = MODELS[name]
    model, x, y = made()
    if x.dim() == 4:  # images
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    torch.set_num_threads(len(DEVICES))  # one for each device
    start = perf_counter()
    pipe = fxpipe.compile(
        model,
        DEVICES,
        schedule=schedule,
        microbatches=MICROBATCHES,
        extensions=extensions,
        **options,
    )
    pipe.step(x, target=y)
    return pipe, x, y, perf_counter() - start


def exact_gradients(name: str) -> list[Tensor]:
    """Those of a step by a plain loop over the micro-batches in float64."""
    made, options = MODELS[name]
    model, x, y = made()
    model.double()
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        part, target = (
            each.double() if each.is_floating_point() else each for each in (part, target)
        )
        (options["loss"](model(part), target) / MICROBATCHES).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def error(name: str, extensions: list[Any], exact: list[Tensor]) -> float:
    """How far the gradients of a pipe's step are from these, relative to their norm."""
    made, options = MODELS[name]
    model, x, y = made()
    with fxpipe.compile(
        model,
        DEVICES,
        microbatches=MICROBATCHES,
        extensions=extensions,
        loss=options["loss"],
    ) as pipe:
        pipe.step(x, target=y)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    off = torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)]).norm()
    return float(off / torch.stack([b.norm() for b in exact]).norm())


def main() -> int:
    """Run the benchmark; returns 1 if gradients of compiled stages are less exact."""
    parser = argparse.ArgumentParser(description="Time stages that inductor has compiled.")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--start", help="print the seconds until the first step is done")
    arguments = parser.parse_args()
    if arguments.start:
        pipe, *_, seconds = make(arguments.models[0], COMPILERS[arguments.start], "1f1b")
        pipe.close()
        print(seconds)
        return 0
    machine = describe()
    figures: list[Figure] = []
    right = True
    for name in arguments.models:
        times: dict[str, list[float]] = defaultdict(list)
        apart: dict[str, float] = defaultdict(float)
        with ExitStack() as stack:
            made = {each: make(name, to, arguments.schedule) for each, to in COMPILERS.items()}
            for pipe, *_ in made.values():
                stack.enter_context(pipe)
            for _ in track(range(WARM_UP + arguments.rounds), f"{name}: a step of each in turn"):
                losses = {}
                for each, (pipe, x, y, _) in made.items():
                    losses[each], seconds = timed(partial(pipe.step, x, target=y))
                    times[each].append(seconds)
                for each, loss in losses.items():
                    other = abs(float(loss / losses["as they are"]) - 1)
                    apart[each] = max(apart[each], other)
        middle = {each: median(took[WARM_UP:]) for each, took in times.items()}
        exact = exact_gradients(name)
        errors = {each: error(name, to, exact) for each, to in COMPILERS.items()}
        for each, took in times.items():
            figures += spread(f"{name}, {each}", took[WARM_UP:])
            text = f"{name}, {each}, gradients of a step within"
            figures.append(Figure(text, errors[each]))
        ratio = middle["as they are"] / middle["inductor"]
        figures.append(Figure(f"{name}, as they are over inductor", ratio))
        figures.append(Figure(f"{name}, inductor, losses within", apart["inductor"]))
        right = right and errors["inductor"] <= 3 * errors["as they are"]
        figures.append(Figure(f"{name}, first start with inductor", made["inductor"][-1], "s"))
        starts: dict[str, list[float]] = defaultdict(list)
        for _ in range(arguments.starts):
            for each in ("as they are", "inductor"):
                command = [sys.executable, "-m", "benchmarks.stage_compilers", name, "--start"]
                told = subprocess.run([*command, each], capture_output=True, text=True, check=True)
                starts[each].append(float(told.stdout))
        if starts:
            before, after = median(starts["as they are"]), median(starts["inductor"])
            figures.append(Figure(f"{name}, start as they are", before, "s"))
            figures.append(Figure(f"{name}, second start with inductor", after, "s"))
            figures.append(Figure(f"{name}, second start over that", after / before))
        publish(figures, arguments, machine)
    return 0 if right else 1


def publish(figures: list[Figure], arguments: argparse.Namespace, machine: Machine) -> None:
    """Write what there is so far."""
    settings = {
        "models": "U-Net and transformer of benchmarks.compare; GPT-2, 4 blocks of width 128, "
        "32 texts of 64 tokens; ResNet, 8 bottlenecks, width 32, 32 images of 3×64×64",
        "micro-batches": MICROBATCHES,
        "devices": ", ".join(DEVICES),
        "schedule": arguments.schedule,
        "rounds": arguments.rounds,
    }
    title = "Stages as they are and compiled by inductor, two CPU devices"
    Report("stage-compilers", title, settings, figures, machine).publish()


if __name__ == "__main__":
    sys.exit(main())
