"""The state of the whole optimizer, by parameter names, so that any partition can load it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError
from fxpipe.runtime.weights.live import copied_state, settings, unshared


@dataclass(frozen=True)
class ParameterState:
    """The optimizer state of one parameter.

    Attributes:
        group: the index of its parameter group.
        state: the optimizer's state for the parameter.
    """

    group: int
    state: Mapping[Any, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        kind: its class.
        groups: the settings of its parameter groups.
        parameters: name in the model → the state of that parameter.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, ParameterState]


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, with copies of those that could be changed in place."""
    return {key: unshared(value) for key, value in settings(group).items()}


Names = Mapping[nn.Parameter, str]
"""Parameter → its name in the model."""


def take(optimizer: Optimizer, names: Names) -> OptimizerState:
    """Return the current state of the optimizer; its tensors are not copied.

    Raises:
        CheckpointError: it keeps state that belongs to no parameter.
    """
    kind = type(optimizer).__qualname__
    strange = [key for key in optimizer.state if key not in names]
    if strange:
        raise CheckpointError(
            f"{kind} keeps state under {strange[0]!r}, which is no parameter of the model"
        )
    parameters = {
        names[parameter]: ParameterState(index, dict(optimizer.state.get(parameter, {})))
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return OptimizerState(kind, [settings(group) for group in optimizer.param_groups], parameters)


def loading(saved: OptimizerState, optimizer: Optimizer, names: Names) -> Callable[[], None]:
    """Check that a state is of this optimizer. Returns a function that loads it. Parameters without
    a name are left as they are.

    Raises:
        CheckpointError: the optimizer is of another class, or has other groups.
    """
    kind, groups = type(optimizer).__qualname__, optimizer.param_groups
    cure = "give compile() the optimizer that the checkpoint was made with"
    if kind != saved.kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved.kind}, and the pipe trains with {kind}; "
            f"{cure}"
        )
    if len(groups) != len(saved.groups):
        raise CheckpointError(
            f"the optimizer has {len(groups)} parameter groups, and the checkpoint's had "
            f"{len(saved.groups)}; {cure}"
        )
    trained = {names[p]: index for index, g in enumerate(groups) for p in g["params"] if p in names}
    for name in (*trained, *saved.parameters):
        if name not in saved.parameters:
            raise CheckpointError(
                f"the optimizer trains {name!r}, and the checkpoint's did not; {cure}"
            )
        if name not in trained:
            raise CheckpointError(
                f"the checkpoint's optimizer trained {name!r}, and the pipe's does not; {cure}"
            )
        if trained[name] != saved.parameters[name].group:
            raise CheckpointError(
                f"{name!r} is in parameter group {trained[name]}, and was in group "
                f"{saved.parameters[name].group} of the checkpoint's optimizer; {cure}"
            )

    def load() -> None:
        optimizer.state.clear()  # before it is loaded: a device may have no memory for both
        for group, values in zip(groups, saved.groups, strict=True):
            group.update(copied_state(dict(values)))
            for parameter in group["params"]:
                kept = saved.parameters.get(names.get(parameter, ""))
                if kept is not None and kept.state:
                    optimizer.state[parameter] = placed(kept.state, parameter, group)

    return load


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
