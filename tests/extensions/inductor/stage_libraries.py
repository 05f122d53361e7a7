"""A model whose stages inductor compiles, and the processes that compile, which tests share.

Each graph takes seconds to compile, so one model has all that tests look for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import fxpipe
from fxpipe.extensions.inductor.libraries import start_pool
from fxpipe.extensions.inductor.library import LibraryCall
from fxpipe.ir.traced import SEED
from fxpipe.random import mix

MICROBATCHES = 3


def settings(folder: Path) -> dict[str, str]:
    """What to set in the environment of a process that shares the libraries in a folder."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent),
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",  # what calls the kernels
        "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",  # for profilers
    }


class Lent:
    """A pool of processes that compile, kept for the next who needs one."""

    def __init__(self, pool: Any) -> None:
        self.submit = pool.submit

    def shutdown(self) -> None:
        """It has answered all that it was asked."""


class Pools:
    """Those that compile: each takes long to start, and there is one for each cache folder."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def __call__(self, count: int, *, fork: bool) -> Lent:
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if folder not in self.kept:
            self.kept[folder] = start_pool(2, fork=fork)
        return Lent(self.kept[folder])

    def end(self) -> None:
        """End them all."""
        for pool in self.kept.values():
            pool.shutdown()


def opened(path: str, mode: str) -> str:
    """Open a named pipe, which waits until it is opened at the other end."""
    open(path, mode).close()
    return mode


def ending(number: int) -> str:
    """End this process, by a number."""
    if number == 1:
        os._exit(1)
    return ""


class Net(nn.Module):
    """Two parts with a skip across, BatchNorm, dropout, and a weight that both read."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(dropout))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.rest(self.layer(x))) @ self.layer.weight
        y: Tensor = self.last(torch.nn.functional.gelu(h @ self.layer.weight.T)) + x
        return y


def made(
    compiler: str | None, schedule: str = "1f1b", extensions: Sequence[Any] = (), **options: Any
) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    optimizer = partial(SGD, lr=0.1, momentum=0.5)
    return fxpipe.compile(
        Net(),
        ["cpu", "cpu"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        partition=["last"],
        loss=mse_loss,
        optimizer=optimizer,
        extensions=[*([compiler] if compiler else ()), *extensions],
        **options,
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 5), torch.randn(12, 5)


def stepped(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a step, which draws the same numbers each time."""
    torch.manual_seed(2)
    loss: Tensor = pipe.step(x, target=y)
    return loss


def graphs(pipe: fxpipe.Pipeline) -> list[LibraryCall | None]:
    """What runs each graph of the stages that computes anything."""
    found = []
    for stage in pipe.plan.stages:
        for graph in (stage.forward, stage.backward, stage.input_grad, stage.weight_grad):
            if graph is not None and any(n.op == "call_function" for n in graph.graph.nodes):
                forward = vars(graph).get("forward")
                found.append(forward if isinstance(forward, LibraryCall) else None)
    return found


def gradients(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor, halves: bool) -> dict[str, Tensor]:
    """Those of a loop over the micro-batches that calls the libraries, one after another, and draws
    what ``stepped`` does."""
    torch.manual_seed(2)
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    one: Any
    two: Any
    one, two = pipe.plan.stages
    state = {**dict(pipe.named_parameters()), **dict(pipe.named_buffers())}
    sums: dict[int, Any] = {0: (), 1: ()}

    def arguments(stage: Any) -> tuple[list[Tensor], list[Tensor]]:
        return [state[a.target] for a in stage.parameters], [state[a.target] for a in stage.buffers]

    def back(stage: Any, saved: list[Any], given: list[Tensor]) -> list[Tensor]:
        sent: list[Tensor]
        if not halves:
            sent, sums[stage.index] = stage.kernel.backward(saved, given, sums[stage.index])
            return sent
        sent, deferred = stage.kernel.input_grad(saved, given)
        sums[stage.index] = stage.kernel.weight_grad(deferred, sums[stage.index])
        return sent

    with torch.no_grad():
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        for microbatch, (x_part, y_part) in enumerate(parts):
            drawn = torch.tensor(mix(seed, microbatch))
            values = {"x": x_part, "target": y_part, SEED: drawn}
            saved = {}
            for stage in (one, two):
                edges = pipe.plan.edges_into(stage.index)
                result = stage.kernel.forward(*arguments(stage), [values[e.value] for e in edges])
                names = dict.fromkeys(e.value for e in pipe.plan.edges_from(stage.index))
                values.update(zip(names, result.outputs, strict=True))
                saved[stage.index] = result.saved
            sent = back(two, saved[1], [torch.tensor(1 / MICROBATCHES)])
            back(one, saved[0], sent)
    return {
        argument.target: total
        for stage in (one, two)
        for argument, total in zip(stage.parameters, sums[stage.index], strict=True)
    }
