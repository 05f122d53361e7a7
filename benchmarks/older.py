"""Compare this checkout with an older one: the time of a step, and of compiling.

Run it on an idle machine, with the folder of the older checkout::

    git worktree add ../older v0.3
    python -m benchmarks.older ../older

Each checkout has its own process, and they take turns. Only features that both have are used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

HERE = Path(__file__).parents[1]
STEPS = {"unet": 15, "transformer": 15, "tiny": 60}
COMPILES = ("U-Net (2, 4)", "GPT-2", "AmoebaNet-D (3, 16)")
ROUNDS = 7
CONTESTANT = "--contestant"
"""What a contestant's process is started with."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time this checkout beside an older one.")
    parser.add_argument("older", type=Path, help="the older checkout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help='a part of a name, such as "step"')
    arguments = parser.parse_args()

    from benchmarks.machine import describe
    from benchmarks.report import Figure, Grid, Report

    machine = describe()
    checkouts = {"older": arguments.older.resolve(), "this": HERE}
    contestants = {name: Contestant(path) for name, path in checkouts.items()}
    samples: dict[str, list[float]] = {}
    every = (*(f"step {case}" for case in STEPS), *(f"compile {m}" for m in COMPILES))
    chosen = [what for what in every if arguments.only in what]
    for round_ in range(arguments.rounds + 1):
        for what in chosen:
            order = sorted(contestants, reverse=round_ % 2 == 0)
            for name in (*order, *reversed(order)):  # a machine that slows down slows both
                seconds = contestants[name].run(what)
                if round_:  # the first round warms up
                    samples.setdefault(f"{what}, {name}", []).append(seconds)
    rows, figures = [], []
    for what in chosen:
        old, new = samples[f"{what}, older"], samples[f"{what}, this"]
        ratio = median(b / a for a, b in zip(by_round(old), by_round(new), strict=True))
        rows.append((what, f"{1e3 * median(old):.4g} ms", f"{1e3 * median(new):.4g} ms"))
        figures.append(Figure(f"{what}: this over older", ratio))
    Report(
        name="older",
        title="This checkout beside an older one",
        settings={
            "older": commit(checkouts["older"]),
            "this": commit(HERE),
            "rounds": f"{arguments.rounds}, each: one, the other, the other, the one; figures are "
            "medians, ratios medians of the rounds' ratios",
            "step": "two CPU devices, 1f1b, equal halves, median of "
            + ", ".join(f"{count} ({name})" for name, count in STEPS.items())
            + " steps a round; models as in `compare`",
            "compile": "two CPU devices, 1f1b, 4 micro-batches, with the first step",
        },
        figures=figures,
        machine=machine,
        grids=[Grid(("", "older", "this"), rows)],
        samples=samples,
    ).publish()
    return 0


def by_round(seconds: Sequence[float]) -> list[float]:
    """A round's two runs together."""
    return [first + then for first, then in zip(seconds[::2], seconds[1::2], strict=True)]


def commit(checkout: Path) -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Contestant:
    """A process that imports one checkout and runs what it is told, one thing at a time."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-P", __file__, CONTESTANT]
        self._process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, what: str) -> float:
        """The seconds that it took."""
        assert self._process.stdin
        assert self._process.stdout
        print(what, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def serve() -> int:
    """A contestant's loop: a line says what to run, a line answers with seconds."""
    import torch

    import fxpipe
    from benchmarks.models import others, own
    from benchmarks.peers.case import CASES

    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(2)
    steps: dict[str, Callable[[], object]] = {}
    cases = {case.name: case for case in (*others.CASES, *own.CASES)}

    def stepping(name: str) -> Callable[[], object]:
        case = CASES[name]
        model, x, y = case.make()
        pipe = fxpipe.compile(
            model,
            ["cpu"] * 2,
            schedule="1f1b",
            microbatches=case.microbatches,
            loss=case.loss,
            optimizer=case.optimizer,
            partition=list(case.cuts),
        )
        pipe.step(x, target=y)
        return lambda: pipe.step(x, target=y)

    def compiling(name: str) -> None:
        case = cases[name]
        torch.manual_seed(0)
        model, batch = case.model(), case.batch(8)
        with fxpipe.compile(
            model, ["cpu"] * 2, schedule="1f1b", microbatches=4, loss=case.loss
        ) as pipe:
            pipe.step(*batch.args, target=batch.target, **batch.kwargs)

    for line in sys.stdin:
        verb, name = line.strip().split(" ", 1)
        if verb == "step":
            if name not in steps:
                steps[name] = stepping(name)
            seconds = median(timed(steps[name]) for _ in range(STEPS[name]))
        else:
            seconds = timed(lambda name=name: compiling(name))  # type: ignore[misc]
        print(seconds, file=answers, flush=True)
    return 0


def timed(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == [CONTESTANT] else main())
