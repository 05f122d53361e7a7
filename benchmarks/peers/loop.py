"""Training without any pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.case import Case
from benchmarks.peers.contender import Contender
from examples import plain


class Loop(Contender):
    """Forward and backward of a micro-batch after the other, and the update."""

    def __init__(self, case: Case, threads: int) -> None:
        torch.set_num_threads(threads)
        self.case = case
        self.model, self.x, self.y = case.make()
        self.optimizer = case.optimizer(self.model.parameters())

    def step(self) -> Tensor:
        """See Contender.step."""
        return plain.step(
            self.model, self.case.loss, self.optimizer, self.x, self.y, self.case.microbatches
        )


class LateLoop(Loop):
    """The same with gradients taken at the weights before the last update, as 2BW has them."""

    def __init__(self, case: Case, threads: int) -> None:
        super().__init__(case, threads)
        self.parameters = list(self.model.parameters())
        self.older = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.register_step_pre_hook(lambda *_: self._load(self.newest))

    def step(self) -> Tensor:
        """See Contender.step."""
        self.newest = [parameter.detach().clone() for parameter in self.parameters]
        self._load(self.older)
        loss = super().step()
        self.older = self.newest
        return loss

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
