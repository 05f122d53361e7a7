"""Weight prediction: extrapolate the weights some updates ahead with the optimizer's momentum.

SpecTrain (arXiv 1809.02839) for SGD with momentum: W − s·η·v. XPipe (arXiv 1911.04610) for Adam
and AdamW: W − s·η·m̂ / (√v̂ + ε), where v is the greatest so far with ``amsgrad``. Both leave out
weight decay, as the papers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from fxpipe.errors import InputError


def check_predictable(optimizer: Optimizer) -> None:
    """Raises InputError if an optimizer has no momentum to predict updates from."""
    if isinstance(optimizer, SGD):
        if all(group["momentum"] for group in optimizer.param_groups):
            return
        raise InputError(
            "Prediction needs a momentum to predict from, and this SGD has none; give "
            "torch.optim.SGD(..., momentum=0.9), or leave it out"
        )
    if not isinstance(optimizer, Adam):  # AdamW is one
        raise InputError(
            f"Prediction cannot predict from the state of {type(optimizer).__name__}; take SGD "
            "with momentum, Adam or AdamW, or leave it out"
        )


def predict_weights(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[Tensor, Tensor],
    updates: int,
) -> None:
    """Change weights in place by some predicted updates.

    Args:
        optimizer: has the state after the last update.
        groups: the settings of its groups at that update.
        weights: parameter → the tensor to change.
        updates: how many updates to predict.
    """
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter in weights and state:
                step = _update(state, {**group, **settings})
                if step is not None:
                    weights[parameter].sub_(step, alpha=updates)


def _update(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """The step that the optimizer would subtract if the next gradient equalled its momentum."""
    rate = float(group["lr"])
    if "momentum" in group:
        velocity: Tensor | None = state.get("momentum_buffer")
        return None if velocity is None else velocity * rate
    first, second = group["betas"]
    count = float(state["step"])
    mean = state["exp_avg"] / (1 - first**count)
    squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    spread = (squares / (1 - second**count)).sqrt_()
    return torch.div(mean, spread.add_(group["eps"])).mul_(rate)
