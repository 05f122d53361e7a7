"""Pipes whose stages run by captured graphs, beside plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.extensions.cuda_graphs.captured import Captured
from fxpipe.extensions.cuda_graphs.capturing import Capturing
from fxpipe.ir.recipe import find_recipe
from tests.helpers.tiny import CUTS, Tiny, batch, within
from tests.oracles import loop


def on_streams(model: nn.Module, devices: int, **options: Any) -> fxpipe.Pipeline:
    """A pipe over streams of one device, in four micro-batches with a loss of classes."""
    given: dict[str, Any] = {"microbatches": 4, "loss": cross_entropy, **options}
    stages = find_recipe(given.get("schedule", "1f1b")).stages(devices)
    if isinstance(model, Tiny) and stages in CUTS:
        given.setdefault("partition", CUTS[stages])
    return fxpipe.compile(model, [torch.cuda.Stream() for _ in range(devices)], **given)


def capturing(
    model: nn.Module, devices: int = 2, extensions: Sequence[Any] = (), **options: Any
) -> fxpipe.Pipeline:
    """A pipe whose stages are captured."""
    return on_streams(model, devices, extensions=[fxpipe.CudaGraphs(), *extensions], **options)


def captures(pipe: fxpipe.Pipeline) -> int:
    """How many captures a pipe has made."""
    return sum(kernel.captures for kernel in kernels(pipe))


def kernels(pipe: fxpipe.Pipeline) -> list[Captured]:
    (made,) = pipe._compiler._wraps
    assert isinstance(made, Capturing)
    return [*made._captured_kernels.values()]


def train(
    model: nn.Module,
    steps: int = 4,
    *,
    devices: int = 2,
    samples: Callable[[int], int] = lambda step: 8,
    make: Callable[[int, int], tuple[Tensor, Tensor]] = batch,
    **options: Any,
) -> tuple[fxpipe.Pipeline, list[int]]:
    """Train with and without graphs, and compare.

    Returns:
        The closed pipe, and the captures that there were after each step.
    """
    plain = copy.deepcopy(model)
    for own, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        own.grad = None if parameter.grad is None else parameter.grad.clone()
    counts = []
    with (
        within(300),
        capturing(model, devices, **options) as pipe,
        on_streams(plain, devices, **options) as other,
    ):
        for each in (pipe, other):  # while something is traced, torch's Adam rounds otherwise
            x, y = make(samples(0), 0)
            each.prepare(x, target=y)
        for step in range(steps):
            x, y = make(samples(step), step)
            assert torch.equal(pipe.step(x, target=y), other.step(x, target=y)), step
            counts.append(captures(pipe))
        pipe.flush()
        other.flush()
        loop.assert_same(loop.gradients(model), loop.gradients(plain))
        loop.assert_same(model.state_dict(), plain.state_dict())
    assert counts[-1] > 0
    assert not any(kernel.overflows for kernel in kernels(pipe))
    return pipe, counts


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)
