"""Predict the memory of an optimizer and of its step, in bytes, without stepping it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from fxpipe.extend import find
from fxpipe.torchtools.optimizers import copy_alone

_SIDE = 64
_FEW = 1 << 22
"""Trial parameters have data if they have fewer bytes than this, as PyTorch then computes faster
than it derives shapes on the meta device."""

_MOST_KNOWN = 1 << 12
_known: dict[tuple[Any, ...], tuple[int, int]] = {}
"""Results for PyTorch's optimizers, by their settings and the layouts of their parameters."""


def optimizer_memory(optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and of its step besides parameters, gradients and
    state at most. Before the first step the state is that after it.

    A copy of the optimizer makes two steps over zeros of the same shapes, without data if they are
    large. If it needs data, or asks for the device, it steps small tensors, and the result is
    scaled up. Results for PyTorch's optimizers are remembered. Without the extension leaf_modules,
    which counts bytes, they are taken for Adam's.
    """
    key = _key(optimizer)
    memory = None if key is None else _known.get(key)
    if memory is None:
        memory = _measured(optimizer)
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = memory
    state, step = memory
    held = (p for group in optimizer.param_groups for p in group["params"])
    kept = {p: optimizer.state[p] for p in held if p in optimizer.state}
    return _bytes(kept) or state, step


def _key(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """A key that determines an optimizer's memory; None if its class or a setting is not
    PyTorch's."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    key: list[Any] = [type(optimizer), torch.get_default_dtype()]
    for group in optimizer.param_groups:
        for name, value in sorted(group.items()):
            if name == "params":
                key += [(p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for p in value]
            elif isinstance(value, Tensor):
                key.append((name, value.shape, value.dtype, value.device))
            elif isinstance(value, int | float | str | tuple | None):
                key.append((name, value))
            else:
                return None
    return tuple(key)


def _measured(optimizer: Optimizer) -> tuple[int, int]:
    """The bytes of the state after two steps, and of the second step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    few = sum(p.nbytes for p in parameters) < _FEW and all(p.is_cpu for p in parameters)
    try:
        device = "cpu" if few else "meta"
        return _steps(optimizer, [_zeros(group, device) for group in optimizer.param_groups])
    except Exception:
        return _in_proportion(optimizer, parameters)


def _steps(optimizer: Optimizer, groups: list[dict[str, Any]]) -> tuple[int, int]:
    """The same for a copy of the optimizer with other parameter groups."""
    stepped, step = copy_alone(optimizer, groups), type(optimizer).step
    step(stepped)
    with find("option", "counting")(meta=True) as counting:
        step(stepped)
    return _bytes(stepped.state), counting.peak


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


def _in_proportion(optimizer: Optimizer, parameters: Sequence[Tensor]) -> tuple[int, int]:
    """Scale up from steps over 3 and over 6 small parameters: the difference tells whether a step
    needs memory for all parameters at once, or for one after another."""
    total = sum(parameter.nbytes for parameter in parameters)
    largest = max((parameter.nbytes for parameter in parameters), default=0)
    try:
        (state, three), (_, six) = (_small(optimizer, parameters[0], count) for count in (3, 6))
    except Exception:
        return 2 * total, 2 * largest  # Adam's
    each = max(six - three, 0) / 3
    return int(state / 3 * total), int(each * total + max(three - 3 * each, 0) * largest)


def _small(optimizer: Optimizer, like: Tensor, count: int) -> tuple[float, float]:
    """The memory of state and step for ``count`` small parameters, in units of one parameter."""
    device = like.device
    small = [nn.Parameter(torch.zeros(_SIDE, _SIDE, device=device)) for _ in range(count)]
    for parameter in small:
        parameter.grad = torch.zeros_like(parameter)
    state, step = _steps(optimizer, [{**optimizer.param_groups[0], "params": small}])
    return state // small[0].nbytes, step // small[0].nbytes


def _bytes(state: Mapping[Any, Any]) -> int:
    leaves = pytree.tree_leaves(dict(state))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
