"""Training with delayed gradients on one device: W(t+1) = W(t) − update(∇f(W(t−d)))."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.oracles import loop

Loss = Callable[..., Tensor]
Factory = Callable[[Any], Optimizer]
Batch = tuple[Tensor, Tensor]

MSE = nn.functional.mse_loss


class DelayedLoop:
    """A plain loop over micro-batches whose gradients are taken at older weights.

    Attributes:
        model: holds the newest version after each batch.
        history: version → name → value of every parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        microbatches: int,
        delays: Callable[..., int],
    ) -> None:
        """Create a loop.

        Args:
            model: the model, trained in place.
            optimizer: over the model's parameters.
            loss: ``loss(output, target)``.
            microbatches: how many micro-batches a batch is split into.
            delays: name of a parameter → how many versions behind the newest it is read.
        """
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.microbatches = microbatches
        self.delays = delays
        self.history = [self._values()]

    @classmethod
    def beside(
        cls,
        model: nn.Module,
        optimizer: Factory,
        microbatches: int,
        *,
        loss: Loss = MSE,
        delay: int = 1,
    ) -> Self:
        """Create a loop over a copy of a model; it reads all parameters ``delay`` versions late."""
        alone = copy.deepcopy(model)
        return cls(alone, optimizer(alone.parameters()), loss, microbatches, lambda _: delay)

    def step(self, x: Any, y: Any) -> Tensor:
        """Train on a batch; returns its loss at the old weights."""
        newest = len(self.history) - 1
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.read(name, max(newest - self.delays(name), 0)))
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.history[newest][name])
        self.optimizer.step()
        self.history.append(self._values())
        return loss

    def backward(self, x: Any, y: Any) -> Tensor:
        """Add the gradients of a batch to ``.grad``; returns its loss."""
        return loop.train(self.model, self.microbatches, x, loss=self.loss, target=y).loss

    def read(self, name: str, version: int) -> Tensor:
        """The value of a parameter at which a batch that reads ``version`` takes its gradient."""
        return self.history[version][name]

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Train on the batches; returns their losses."""
        return [self.step(x, y) for x, y in batches]

    def states(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """Train on the batches; returns the model's state before them and after each."""
        found = [copy.deepcopy(self.model.state_dict())]
        for x, y in batches:
            self.step(x, y)
            found.append(copy.deepcopy(self.model.state_dict()))
        return found

    def restart(self) -> None:
        """Forget all versions but the newest, as a flush does."""
        self.history = [self._values()]

    def assert_trained(
        self,
        pipe: Any,
        model: nn.Module,
        batches: Sequence[Batch],
        flush_at: Collection[int] = (),
    ) -> None:
        """Check that a pipe trains ``model`` like this loop, to the bit: the losses, and the state
        after the last batch and after flushes behind the batches ``flush_at``."""
        for number, (x, y) in enumerate(batches):
            loss = pipe.step(x, target=y)
            assert torch.equal(loss, self.step(x, y)), f"loss of batch {number}"
            if number in flush_at or number == len(batches) - 1:
                pipe.flush()
                self.assert_same(model)

    def assert_same(self, model: nn.Module, bound: float = 0.0) -> None:
        """Check that another model has the same state; see ``loop.assert_same``."""
        loop.assert_same(model.state_dict(), self.model.state_dict(), bound)

    def _values(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class RuledLoop(DelayedLoop):
    """A loop with delays by micro-batch: ``delays`` takes a parameter's name and the micro-batch.

    Attributes:
        oldest: name of a parameter → the version that stands for all before it.
    """

    oldest: Mapping[str, int] = {}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on a batch, each micro-batch at its own versions; returns the loss."""
        newest = len(self.history) - 1
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        parts = zip(
            x.tensor_split(self.microbatches), y.tensor_split(self.microbatches), strict=True
        )
        for i, (inputs, targets) in enumerate(parts):
            for name, parameter in self.model.named_parameters():
                version = max(newest - self.delays(name, i), self.oldest.get(name, 0))
                parameter.data.copy_(self.read(name, version))
            loss = self.loss(self.model(inputs), targets) * (len(inputs) / len(x))
            loss.backward()
            losses.append(loss.detach())
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.history[newest][name])
        self.optimizer.step()
        self.history.append(self._values())
        return functools.reduce(torch.add, losses)
