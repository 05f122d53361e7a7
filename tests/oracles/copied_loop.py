"""A plain training loop that sums gradients like stages with copies on several devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop, Loss


class CopiedLoop(DelayedLoop):
    """A plain loop over micro-batches that sums the gradients of a parameter copy by copy.

    Each copy adds the gradients of its micro-batches in order; copy 0, the stage's own device, adds
    them to ``.grad``. Then the sums of the copies are added in the order of the copies.

    Attributes:
        copy_of: name of a parameter and micro-batch → 0, or the number of the copy.
        clip: the maximum norm of all gradients, or None.
    """

    clip: float | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        microbatches: int,
        copy_of: Callable[[str, int], int],
    ) -> None:
        """Create a loop; see ``DelayedLoop``."""
        super().__init__(model, optimizer, loss, microbatches, lambda name: 0)
        self.copy_of = copy_of

    def backward(self, x: Any, y: Any) -> Tensor:
        """Add the gradients of a batch to ``.grad`` and clip them; returns its loss."""
        parameters = dict(self.model.named_parameters())
        sums: dict[str, dict[int, Tensor]] = {
            name: {} if parameter.grad is None else {0: parameter.grad}
            for name, parameter in parameters.items()
        }
        losses: list[Tensor] = []
        for i, (inputs, targets) in enumerate(loop.split((x, y), len(x), self.microbatches)):
            loss = self.loss(self.model(inputs), targets) * (len(inputs) / len(x))
            losses.append(loss.detach())
            found = torch.autograd.grad(loss, list(parameters.values()))
            for name, gradient in zip(parameters, found, strict=True):
                copy, own = self.copy_of(name, i), sums[name]
                own[copy] = own[copy] + gradient if copy in own else gradient
        for name, parameter in parameters.items():
            every = [total for _, total in sorted(sums[name].items())]
            parameter.grad = functools.reduce(torch.add, every).clone()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return functools.reduce(torch.add, losses)
