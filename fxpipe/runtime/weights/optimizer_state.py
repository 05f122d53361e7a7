"""The state of optimizers comes to the devices of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def bring(optimizer: Optimizer) -> None:
    """Bring state that was loaded before its parameters came to their devices there, too."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            values = [x for x in kept.values() if isinstance(x, Tensor) and x.dim()]
            if any(not x.is_meta and x.device != parameter.device for x in values):
                optimizer.state[parameter] = placed(kept, parameter, group)


def placed(
    state: Mapping[str, Any], parameter: Tensor, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of a parameter's state on the device and in the layout of the parameter. Step counts
    stay on the CPU, as in torch's optimizers, unless a kernel on the device reads them."""
    on_device = settings.get("capturable") or settings.get("fused")

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or (key == "step" and not on_device):
            return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        if value.shape != parameter.shape:
            return value.to(parameter.device, copy=True)
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    return {key: place(key, value) for key, value in state.items()}
