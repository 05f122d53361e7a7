"""Predict the memory of an optimizer and of its step, in bytes, without stepping it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from fxpipe.torchtools.counting import Counting
from fxpipe.torchtools.optimizers import copy_alone
from fxpipe.torchtools.pytrees import in_blocks

_FEW = 1 << 22
"""Trial parameters have data if they have fewer bytes than this, as PyTorch then computes faster
than it derives shapes on the meta device."""

_MOST_KNOWN = 1 << 12
_known: dict[Hashable, tuple[int, int]] = {}
"""Results for PyTorch's optimizers, by their settings and the layouts of their parameters."""


def optimizer_memory(optimizer: Optimizer, block: int = 1) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and of its step besides parameters, gradients and
    state at most. Before the first step the state is that after it. Each tensor takes a multiple of
    ``block`` bytes; unless that is 1, it is of a device, and what is on the CPU does not count.

    A copy of the optimizer makes two steps over zeros of the same shapes, without data if they are
    large. What a class that needs data then, or the device, takes is counted as Adam's. Results for
    PyTorch's optimizers are remembered.
    """
    key = _key(optimizer, block)
    if key is None or key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _measured(optimizer, block)
    state, step = _known[key]
    held = (p for group in optimizer.param_groups for p in group["params"])
    kept = {p: optimizer.state[p] for p in held if p in optimizer.state}
    return _bytes(kept, block) or state, step


def _key(optimizer: Optimizer, block: int) -> Hashable:
    """What determines the memory of one of PyTorch's optimizers; None for others."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    groups = optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    layouts = [
        tuple((p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for p in group["params"])
        for group in groups
    ]
    return block, type(optimizer), torch.get_default_dtype(), repr(settings), tuple(layouts)


def _measured(optimizer: Optimizer, block: int) -> tuple[int, int]:
    """The bytes of the state after two steps, and of the second step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    few = sum(p.nbytes for p in parameters) < _FEW and all(p.is_cpu for p in parameters)
    try:
        device = "cpu" if few and block == 1 else "meta"
        groups = [_zeros(group, device) for group in optimizer.param_groups]
        return _steps(optimizer, groups, block)
    except Exception:
        sizes = [in_blocks(parameter.nbytes, block) for parameter in parameters]
        return 2 * sum(sizes), 2 * max(sizes, default=0)


def _steps(optimizer: Optimizer, groups: list[dict[str, Any]], block: int) -> tuple[int, int]:
    """The same for a copy of the optimizer with other parameter groups."""
    stepped, step = copy_alone(optimizer, groups), type(optimizer).step
    step(stepped)
    with Counting(meta=block) as counting:
        step(stepped)
    return _bytes(stepped.state, block), counting.peak


def _zeros(group: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A parameter group with zeros for its parameters and gradients."""
    real = group["params"]
    zeros = [nn.Parameter(torch.zeros_like(p, device=device), p.requires_grad) for p in real]
    for parameter in zeros:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    result = {**group, "params": zeros}
    kinds = _get_foreach_kernels_supported_devices()
    if result.get("foreach", 0) is None and real and all(p.device.type in kinds for p in real):
        result["foreach"] = True  # as torch chooses where the parameters really are
    return result


def _bytes(state: Mapping[Any, Any], block: int) -> int:
    leaves = [x for x in pytree.tree_leaves(dict(state)) if isinstance(x, Tensor)]
    return sum(in_blocks(x.nbytes, block) for x in leaves if block == 1 or not x.is_cpu)
