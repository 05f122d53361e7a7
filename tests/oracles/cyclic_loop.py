"""Cyclic data parallelism as in its paper: N micro-batches, N stages, two sets of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class CyclicLoop:
    """θ(t+1) = θ(t) − γ/N Σ_i ∇f_i(θ̂(i, t)), with stages numbered from 1 as in the paper.

    In version 1, θ̂(i, t) is θ(t − 1) on all stages. In version 2 it is θ(t − 1) on the stages
    1 … N − i, and θ(t) on the later ones, which have all gradients of step t − 1 by then.

    Attributes:
        model: a sequence of N stages; it holds θ(t).
        before: θ(t − 1), by name.
    """

    def __init__(
        self, stages: nn.Sequential, optimizer: Callable[[Any], Optimizer], version: int
    ) -> None:
        """Create a loop that trains a copy of the stages."""
        self.model = copy.deepcopy(stages)
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._optimizer = optimizer(self.model.parameters())
        self._version = version

    def step(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        """Train on N micro-batches of equal size; returns their mean loss."""
        n = len(self.model)
        now = dict(self.model.named_parameters())
        sums: dict[str, Tensor] = {}
        total = torch.zeros((), dtype=inputs.dtype)
        for i, (x, y) in enumerate(zip(inputs.chunk(n), targets.chunk(n), strict=True), start=1):
            read = {}
            for name, parameter in now.items():
                stage = int(name.partition(".")[0]) + 1
                late = self._version == 1 or stage <= n - i
                read[name] = (self.before[name] if late else parameter.detach()).requires_grad_()
            made = loss(torch.func.functional_call(self.model, read, (x,)), y) * (1 / n)
            gradients = torch.autograd.grad(made, list(read.values()))
            for name, gradient in zip(read, gradients, strict=True):
                sums[name] = sums[name] + gradient if name in sums else gradient
            total = total + made.detach()
        self.before = {name: parameter.detach().clone() for name, parameter in now.items()}
        for name, parameter in now.items():
            parameter.grad = sums[name]
        self._optimizer.step()
        return total

    def run(
        self, batches: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor]
    ) -> list[Tensor]:
        """Train on the batches one after another; returns their losses."""
        return [self.step(x, y, loss) for x, y in batches]
