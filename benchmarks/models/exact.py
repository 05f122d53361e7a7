"""Train a model as a pipeline and as a plain loop, and say whether both are the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.models.cases import Batch, Case, Loss
from examples.plain import one_thread

MICROBATCHES = 4
ROWS = 8
STEPS = 2


@dataclass(frozen=True)
class Run:
    """What training a model over some stages came to.

    Attributes:
        differing: what is not equal bit for bit: the loss, or names of parameters or buffers.
        compiling: processor seconds from the model to a pipe that is ready for its first step.
    """

    differing: tuple[str, ...]
    compiling: float


def run(case: Case, schedule: str, stages: int) -> Run:
    """Train two steps both ways, without an optimizer, so that gradients add up."""
    torch.manual_seed(0)
    model = case.model()
    alone = copy.deepcopy(model)
    batches = [case.batch(ROWS) for _ in range(STEPS)]
    example = batches[0].args, {**batches[0].kwargs, "target": batches[0].target}
    start = process_time()
    with fxpipe.compile(
        model,
        ["cpu"] * stages,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss=case.loss,
        example=example,
    ) as pipe:
        seconds = process_time() - start
        losses = [pipe.step(*b.args, target=b.target, **b.kwargs) for b in batches]
    with one_thread():
        expected = [step(alone, case.loss, batch) for batch in batches]
    same = all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    return Run((*([] if same else ["the loss"]), *differing(model, alone)), seconds)


def step(model: nn.Module, loss: Loss | None, batch: Batch) -> Tensor:
    """Add the gradients of a batch to ``.grad``, micro-batch by micro-batch."""
    total = torch.zeros(())
    for part in split(batch):
        output = model(*part.args, **part.kwargs)
        value = output.loss if loss is None else loss(output, *_targets(part))
        value = value / MICROBATCHES
        value.backward()
        total += value.detach()
    return total


def split(batch: Batch) -> list[Batch]:
    """The micro-batches, all of one size."""

    def part(value: Any, index: int) -> Any:
        if isinstance(value, tuple):
            return tuple(part(each, index) for each in value)
        return None if value is None else value.tensor_split(MICROBATCHES)[index]

    return [
        Batch(
            part(batch.args, index),
            {name: part(value, index) for name, value in batch.kwargs.items()},
            part(batch.target, index),
        )
        for index in range(MICROBATCHES)
    ]


def differing(model: nn.Module, alone: nn.Module) -> list[str]:
    """The names at which two models' gradients or buffers are not the same bits."""
    pairs = zip(model.named_parameters(), alone.named_parameters(), strict=True)
    names = [name for (name, a), (_, b) in pairs if not _equal(a.grad, b.grad)]
    buffers = zip(model.named_buffers(), alone.named_buffers(), strict=True)
    return names + [name for (name, a), (_, b) in buffers if not _equal(a, b)]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _targets(batch: Batch) -> tuple[Tensor, ...]:
    return batch.target if isinstance(batch.target, tuple) else (batch.target,)
