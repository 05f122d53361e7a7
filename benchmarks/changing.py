"""What steps cost where something changes at each of them: globals of a script that have the names
of attributes of its model, file names and numbers in the batch, an attribute that anneals.

Beside them the same model steps in a module of its own, where nothing changes; all in turn. Then
resident memory over steps of ever other sizes of the batch, and ever other strings that the model
reads. Run it with ``python -m benchmarks.changing`` on an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report

norm: Any = 0.0
size: Any = 0
mean: Any = 0.0
"""Globals that the model does not read; its attributes and methods of tensors have these names."""

FIRST = 10
"""The steps in which compilations are counted."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(self.norm(x)))


class Net(nn.Module):
    """Blocks, with a penalty of a weight that may change."""

    def __init__(self, width: int = 64, blocks: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head, self.beta = nn.Linear(width, 5), 0.0

    def forward(self, x: Tensor, split: str = "train", **others: Any) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        head = self.head(x.mean(1)).reshape(x.size(0), -1)
        return head if split == "train" else 2 * head, self.beta * x.square().mean()


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + output[1]


def _globals(net: Any, step: int) -> dict[str, Any]:
    global norm, size, mean
    norm, size, mean = float(step), step, torch.tensor(float(step))
    return {}


def _anneal(net: Any, step: int) -> dict[str, Any]:
    net.beta = step / 100
    return {}


def _loader(net: Any, step: int) -> dict[str, Any]:
    return {"files": [f"{step}_{i}.png" for i in range(16)], "mixed": step / 7, "index": step}


CASES: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "nothing changes, in a module of its own": lambda net, step: {},
    "globals with the names of attributes": _globals,
    "file names, a float and a counter in the batch": _loader,
    "an attribute that anneals": _anneal,
}


def apart() -> Any:
    """This file as another module, whose globals stay as they are."""
    spec = importlib.util.spec_from_file_location("apart", __file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["apart"] = module
    spec.loader.exec_module(module)
    return module


def _steps(rounds: int) -> list[list[str]]:
    """A row for each case: the first steps that compiled, and the median of the later ones."""
    x, y = torch.randn(16, 8, 64), torch.randint(5, (16,))
    pipes, taken = {}, {name: list[float]() for name in CASES}
    compiled = dict.fromkeys(CASES, 0)
    for name in CASES:
        where = apart() if "its own" in name else sys.modules[__name__]
        torch.manual_seed(0)
        net = where.Net()
        pipes[name] = net, fxpipe.compile(net, devices=2, microbatches=4, loss=where.loss)
    for step in range(FIRST + rounds):
        for name, (net, pipe) in pipes.items():
            batch = CASES[name](net, step)
            before, begun = pipe._compiler.plans.made, time.process_time()
            pipe.step(x, target=y, **batch)
            spent = time.process_time() - begun
            if step < FIRST:
                compiled[name] += pipe._compiler.plans.made > before
            else:
                taken[name].append(1e3 * spent)
    for _, pipe in pipes.values():
        pipe.close()
    plain = median(taken[next(iter(CASES))])
    return [
        [name, f"{compiled[name]}", f"{median(ms):.2f} ms", f"{median(ms) / plain:.2f}"]
        for name, ms in taken.items()
    ]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def _grows(rounds: int) -> list[list[str]]:
    """Resident memory while 40 sizes of the batch and 40 strings take turns."""
    rows = []
    with fxpipe.compile(Net(), devices=2, microbatches=4, loss=loss) as pipe:
        for step in range(rounds):
            kind, samples = step // 2 % 40, 16
            batch: dict[str, Any] = {"split": f"part {kind}"} if step % 2 else {}
            if not step % 2:
                samples = 8 + 4 * kind
            pipe.step(torch.randn(samples, 8, 64), target=torch.randint(5, (samples,)), **batch)
            if step + 1 in (1, 2, 20, 40, 80, 120, 160, 200):
                rows.append(
                    [
                        f"{step + 1}",
                        f"{_resident():.0f} MiB",
                        f"{len(pipe._compiler.memo.values('call'))}",
                    ]
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Time steps where something changes at each.")
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    machine = describe()
    torch.set_num_threads(1)
    rows = _steps(rounds)
    grown = _grows(200)
    worst = max(float(row[-1]) for row in rows)
    report = Report(
        "changing",
        "Steps where something changes at each of them",
        {
            "model": "twelve residual blocks of width 64, batch 16 of 8 rows, 4 micro-batches",
            "rounds": f"{FIRST} in which compilations are counted, then {rounds} in turn, of which "
            "the median of the processor time is told",
            "memory": "40 sizes of the batch and 40 strings that the model reads, in turn",
        },
        [Figure("the most that a step takes, over one where nothing changes", worst)],
        machine,
        grids=[
            Grid(["what changes", f"compile, of {FIRST}", "a later step", "over plain"], rows),
            Grid(["steps", "resident", "calls kept"], grown),
        ],
    )
    report.publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
