"""What ``fxpipe.watch`` costs: a step of the tiny model without it and with it, in turn, and the
calls of Python functions in each. Run it with ``python -m benchmarks.watching``.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import repeat
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.overhead import MICROBATCHES, WIDTH, tiny
from benchmarks.report import Figure, Report

WARM_UP = 30
"""Steps before any is counted; the advice is given among them."""


class Terminal(io.StringIO):
    """Where the line is shown."""

    def isatty(self) -> bool:
        return True


def stepping(stack: ExitStack, *, watched: bool, metered: bool) -> Callable[[], Any]:
    """A function that takes a batch, and trains a pipe of its own on it."""
    pipe = stack.enter_context(
        fxpipe.compile(
            tiny(), 2, microbatches=MICROBATCHES, loss=mse_loss, optimizer=torch.optim.SGD
        )
    )
    x, y = torch.randn(2, MICROBATCHES, WIDTH)
    batches: Iterator[tuple[Tensor, Tensor]] = repeat((x, y))
    if watched:
        batches = iter(fxpipe.watch(pipe, batches, stream=Terminal()))
    elif metered:
        pipe.prepare(x, target=y)
        _ = pipe.metrics

    def step() -> None:
        inputs, target = next(batches)
        pipe.step(inputs, target=target)

    return step


def calls(step: Callable[[], Any], steps: int) -> float:
    """The calls of Python functions in a step, in the mean, in the thread that calls it."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return count / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    machine = describe()
    torch.set_num_threads(1)
    kinds = {
        "a step": {"watched": False, "metered": False},
        "a step whose metrics were read once": {"watched": False, "metered": True},
        "a watched step": {"watched": True, "metered": True},
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        steps = {name: stepping(stack, **kind) for name, kind in kinds.items()}
        for number in range(WARM_UP + rounds):
            for name, step in steps.items():
                begun = time.process_time()
                step()
                if number >= WARM_UP:
                    taken[name].append(time.process_time() - begun)
        counted = {name: calls(step, 100) for name, step in steps.items()}
    plain, _, watched = (median(each) for each in taken.values())
    figures = [Figure(name, 1e3 * median(each), "ms") for name, each in taken.items()]
    figures += [Figure(f"{name}: calls of functions", count) for name, count in counted.items()]
    ratios = [b / a for a, _, b in zip(*taken.values(), strict=True)]
    figures.append(Figure("a watched step over a step, medians", watched / plain))
    figures.append(Figure("the same, median of the rounds", median(ratios)))
    setting = {
        "model": f"four layers of width {WIDTH}, {MICROBATCHES} micro-batches, two devices",
        "times": f"processor time of {rounds} steps, in turn; the line is shown on a terminal",
        "calls": "the mean of 100 steps after these, in the thread that calls step",
    }
    Report("watching", "What watching a run costs", setting, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
