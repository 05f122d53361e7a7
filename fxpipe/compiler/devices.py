"""Move parameters, buffers and inputs between devices: each tensor to the stage that reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.plan import Plan


def settle(plan: Plan, state: Mapping[str, Tensor], devices: tuple[torch.device, ...]) -> None:
    """Move each stage's parameters and buffers to its device. Tensors stay the same objects.

    Args:
        plan: the stages; no two of them have the same parameter or buffer.
        state: name in the model → parameter, buffer or constant.
        devices: stage → its device.
    """
    for stage in plan.stages:
        for argument in (*stage.parameters, *stage.buffers):
            move(state[argument.target], devices[stage.index])


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor and its gradient to a device. It stays the same object."""
    if tensor.device == device:
        return
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None
        tensor.data = tensor.data.to(device)
        if gradient is not None:
            tensor.grad = gradient.to(device)


@contextmanager
def gathered(model: nn.Module, others: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, the whole model is on one device, where it can be called and traced."""
    tensors = [*model.parameters(), *model.buffers(), *others]
    before = [tensor.device for tensor in tensors]
    try:
        for tensor in tensors:
            move(tensor, device)
        yield
    finally:
        for tensor, home in zip(tensors, before, strict=True):
            move(tensor, home)


def to_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    """Copies of the inputs on a device; those that require gradients still do."""
    return [
        leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
