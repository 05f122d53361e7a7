"""Weights predicted by momentum, as SpecTrain (Chen et al., 2018, arXiv 1809.02839) and XPipe (Guan
et al., 2019, arXiv 1911.04610) do, for schedules in which batches read older weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def predicting(base: type[Optimizer], steps: int = 1) -> Callable[..., Optimizer]:
    """A class of optimizers whose parameters hold w(t) + steps · (w(t) − w(t−1)): the weights that
    ``steps`` more updates like the last one, by ``base``, would make.

    The last update is momentum's velocity with SGD, as in SpecTrain, and the quotient of both
    moments with Adam, as in XPipe. ``steps`` is the schedule's delay, 1 for ``2bw``.
    """

    class Predicting(base):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            every = [p for group in self.param_groups for p in group["params"]]
            before = {p: self.state[p].pop("true", p).clone() for p in every if p.grad is not None}
            for p, true in before.items():
                p.copy_(true)
            result = super().step(closure)
            for p, true in before.items():
                self.state[p]["true"] = p.clone()
                p.add_(p - true, alpha=steps)
            return result

        def true_weights(self) -> dict[Tensor, Tensor]:
            return {p: kept["true"] for p, kept in self.state.items() if "true" in kept}

    Predicting.__qualname__ = Predicting.__name__ = f"Predicting{base.__name__}"
    return Predicting
