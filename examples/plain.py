"""A plain training loop over micro-batches on one device, without fxpipe.

A pipeline must give the same losses and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    target: Tensor,
    microbatches: int,
) -> Tensor:
    """Train on a batch, weighting each micro-batch by its share of it; returns the loss."""
    optimizer.zero_grad()
    total = torch.zeros((), device=inputs.device)
    parts = (whole.tensor_split(microbatches) for whole in (inputs, target))
    for x, y in zip(*parts, strict=True):
        part = loss(model(x), y) * (len(x) / len(inputs))
        part.backward()
        total += part.detach()
    optimizer.step()
    return total


@contextmanager
def one_thread() -> Iterator[None]:
    """Run with one intra-op thread, as each device of a pipeline over CPU cores does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
