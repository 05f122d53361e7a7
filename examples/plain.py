"""Training on one device without a pipeline: a plain loop over the micro-batches.

It knows nothing of fxpipe. A pipeline's losses and weights are compared with those made here.
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
    """One update from the gradients of a batch, each micro-batch weighted by its share of it."""
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
    """Run with one intra-op thread, as each device of a pipeline over the CPU's cores has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
