"""The state of all stages' optimizers, by parameter names, so that any partition can load it."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError
from fxpipe.runtime.weights.live import copied_state, settings, unshared


@dataclass(frozen=True)
class GroupState:
    """A parameter group of one stage's optimizer.

    Attributes:
        kind: the optimizer's class.
        index: the group's index among the optimizer's groups.
        settings: the group without its parameters.
    """

    kind: str
    index: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ParameterState:
    """The optimizer state of one parameter.

    Attributes:
        group: the index of its group in ``OptimizerState.groups``.
        state: the optimizer's state for the parameter.
    """

    group: int
    state: Mapping[Any, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizers of all stages.

    Attributes:
        groups: the parameter groups of all optimizers; equal ones once.
        parameters: name in the model → the state of that parameter.
    """

    groups: Sequence[GroupState]
    parameters: Mapping[str, ParameterState]


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, with copies of those that could be changed in place."""
    return {key: unshared(value) for key, value in settings(group).items()}


Optimizers = Sequence[Optimizer | None]
Names = Mapping[nn.Parameter, str]
"""Parameter → its name in the model."""


def take(optimizers: Optimizers, names: Names) -> OptimizerState:
    """Return the current state of the optimizers; its tensors are not copied.

    Raises:
        CheckpointError: an optimizer keeps state that belongs to no parameter.
    """
    groups: list[GroupState] = []
    parameters: dict[str, ParameterState] = {}
    for optimizer, index, group in _groups(optimizers):
        kind = type(optimizer).__qualname__
        strange = [key for key in optimizer.state if key not in names]
        if strange:
            raise CheckpointError(
                f"{kind} keeps state under {strange[0]!r}, which is no parameter of the model"
            )
        taken = GroupState(kind, index, settings(group))
        place = next((i for i, known in enumerate(groups) if _same(taken, known)), len(groups))
        groups[place:] = groups[place:] or [taken]
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            parameters[names[parameter]] = ParameterState(place, state)
    return OptimizerState(groups, parameters)


def loading(saved: OptimizerState, optimizers: Optimizers, names: Names) -> Callable[[], None]:
    """Check that a state is of these optimizers. Returns a function that loads it. Parameters
    without a name are left as they are.

    Raises:
        CheckpointError: an optimizer is of another class or has other parameters, or parameters of
            one group had different settings.
    """
    for name, each in saved.parameters.items():
        if not 0 <= each.group < len(saved.groups):
            raise CheckpointError(
                f"the checkpoint is damaged: {name!r} is in parameter group {each.group} of "
                f"{len(saved.groups)}"
            )
    groups: list[tuple[Optimizer, dict[str, Any], dict[str, Any]]] = []
    for optimizer, index, group in _groups(optimizers):
        own = [names[parameter] for parameter in group["params"] if parameter in names]
        for name in own:
            _check_kind(saved, optimizer, name)
        groups.append((optimizer, group, _settings(saved, optimizer, index, own)))
    found = {names.get(p) for _, group, _ in groups for p in group["params"]}
    missing = next((name for name in saved.parameters if name not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"the checkpoint holds the state of an optimizer for {missing!r}, and no optimizer of "
            "the pipe trains it; give compile() the optimizer that it was made with"
        )

    def load() -> None:
        for optimizer, group, values in groups:
            optimizer.state.clear()
            group.update(values)
        # not before the old state is gone: a device may have no memory for both
        for optimizer, group, values in groups:
            for parameter in group["params"]:
                kept = saved.parameters.get(names.get(parameter, ""))
                if kept is not None and kept.state:
                    optimizer.state[parameter] = placed(kept.state, parameter, values)

    return load


def _check_kind(saved: OptimizerState, optimizer: Optimizer, name: str) -> None:
    kind = type(optimizer).__qualname__
    if name not in saved.parameters:
        raise CheckpointError(
            f"the optimizer trains {name!r}, and the checkpoint's did not; give compile() the "
            "optimizer that the checkpoint was made with"
        )
    saved_kind = saved.groups[saved.parameters[name].group].kind
    if kind != saved_kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved_kind} for {name!r}, and the pipe trains "
            f"it with {kind}; give compile() the optimizer that it was made with"
        )


def described(value: Any) -> str:
    """A tensor as ``6×6 of float32``; any other value as its short repr."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    sizes = "×".join(map(str, value.shape)) or "a scalar"
    return f"{sizes} of {value.dtype}".replace("torch.", "")


def _groups(optimizers: Optimizers) -> Iterator[tuple[Optimizer, int, dict[str, Any]]]:
    for optimizer in filter(None, optimizers):
        for index, group in enumerate(optimizer.param_groups):
            yield optimizer, index, group


def _settings(
    saved: OptimizerState, optimizer: Optimizer, index: int, names: Sequence[str]
) -> dict[str, Any]:
    """The saved settings for a group with parameters of these names: theirs, or for an empty group
    those of the saved group of the same class and index. Raises CheckpointError if they differ."""
    if not names:
        kind = type(optimizer).__qualname__
        like = (g.settings for g in saved.groups if (g.kind, g.index) == (kind, index))
        return dict(copied_state(next(like, {})))
    first = saved.groups[saved.parameters[names[0]].group]
    for name in names[1:]:
        key = differing(first.settings, saved.groups[saved.parameters[name].group].settings)
        if key is not None:
            raise CheckpointError(
                f"{names[0]!r} and {name!r} are in one parameter group here, and had different "
                f"{key!r} in the checkpoint; let the optimizer function put them in different "
                "groups as then"
            )
    return dict(copied_state(first.settings))


def _same(a: GroupState, b: GroupState) -> bool:
    same = (a.kind, a.index) == (b.kind, b.index)
    return same and differing(a.settings, b.settings) is None


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The name of the first setting that differs, or None."""
    for key in (*a, *b):
        if key not in a or key not in b:
            return key
        first, second = (x.tolist() if isinstance(x, Tensor) else x for x in (a[key], b[key]))
        if first != second:
            return key
    return None


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
