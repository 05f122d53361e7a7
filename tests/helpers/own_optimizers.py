"""Optimizers as users write them, and groups of parameters with settings of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Nesterov(Optimizer):
    """A user's own optimizer, with a counter in its group and an attribute of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.decay = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                momentum.mul_(self.decay).add_(parameter.grad)
                parameter.sub_(
                    parameter.grad + self.decay * momentum, alpha=group["lr"] / group["k"]
                )


def groups(parameters: Any) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in listed if p.dim() < 2], "weight_decay": 0.0},
    ]


class Orthogonal(Optimizer):
    """Muon's update for matrices, sign descent for all else, and an attribute that counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = state.setdefault("moment", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 1 - group["momentum"])
                rate = group["lr"] / self.steps
                if parameter.dim() == 2:
                    left, _, right = torch.linalg.svd(moment, full_matrices=False)
                    parameter.sub_(left @ right, alpha=rate)
                else:
                    parameter.sub_(moment.sign(), alpha=rate)
