"""How long ``pipe.save(folder, wait=False)`` stops training: beside a copy of the same tensors in
host memory, and beside a save that waits, in turn. Run it with ``python -m benchmarks.saving``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report

WIDTH, LAYERS = 1024, 8


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    machine = describe()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(8, WIDTH)
    copied, waited, beside = list[float](), list[float](), list[float]()
    with (
        TemporaryDirectory() as folder,
        fxpipe.compile(model, 2, microbatches=2, loss=mse_loss, optimizer=torch.optim.Adam) as pipe,
    ):
        pipe.step(x, target=x)
        kept = [p.detach() for p in model.parameters() for _ in range(3)]  # Adam has two more
        path = Path(folder, "run")
        for _ in range(rounds):
            copied.append(seconds(lambda: [each.clone() for each in kept]))
            waited.append(seconds(lambda: pipe.save(path)))
            beside.append(seconds(lambda: pipe.save(path, wait=False)))
            pipe.save(path)  # waits for the folder before it
    size = sum(each.nbytes for each in kept) / 2**20
    ratios = [b / a for a, b in zip(copied, beside, strict=True)]
    figures = [
        Figure("a copy in host memory", 1e3 * median(copied), "ms"),
        Figure("save(wait=False) returns after", 1e3 * median(beside), "ms"),
        Figure("save returns after", 1e3 * median(waited), "ms"),
        Figure("save(wait=False) over the copy, median of the rounds", median(ratios)),
    ]
    setting = {"state": f"{size:.0f} MiB: weights and Adam's, two devices", "rounds": str(rounds)}
    Report("saving", "How long saving stops training", setting, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
