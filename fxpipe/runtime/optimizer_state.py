"""What optimizers keep, by names in the model: taken from all stages, put into any others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError
from fxpipe.runtime.snapshot import settings


@dataclass(frozen=True)
class GroupState:
    """A parameter group of one stage's optimizer.

    Attributes:
        kind: the optimizer's class.
        index: the group's place among the optimizer's groups.
        settings: all of the group but its parameters.
    """

    kind: str
    index: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ParameterState:
    """One parameter's.

    Attributes:
        group: the place of its group in ``OptimizerState.groups``.
        state: what the optimizer keeps for it.
    """

    group: int
    state: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The optimizers of all stages.

    Attributes:
        groups: the groups of all of them; of equal ones, the first.
        parameters: name in the model → what is kept for that parameter.
    """

    groups: Sequence[GroupState]
    parameters: Mapping[str, ParameterState]


Optimizers = Sequence[Optimizer | None]
Names = Mapping[nn.Parameter, str]
"""Parameter → its name in the model."""


def take(optimizers: Optimizers, names: Names) -> OptimizerState:
    """What they keep now. The tensors are their own, not copies.

    Raises:
        CheckpointError: one keeps something that belongs to no parameter.
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
        made = GroupState(kind, index, settings(group))
        place = next((i for i, other in enumerate(groups) if _same(made, other)), len(groups))
        groups[place:] = groups[place:] or [made]
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            parameters[names[parameter]] = ParameterState(place, state)
    return OptimizerState(groups, parameters)


def check_kinds(saved: OptimizerState, optimizers: Optimizers, names: Names) -> None:
    """Raises CheckpointError where an optimizer is of another kind than that of its parameters."""
    for optimizer, _, group in _groups(optimizers):
        kind = type(optimizer).__qualname__
        for parameter in group["params"]:
            name = names[parameter]
            if name not in saved.parameters:
                raise CheckpointError(
                    f"the optimizer trains {name!r}, and the one of the checkpoint did not; give "
                    "compile() the optimizer that the checkpoint was made with"
                )
            other = saved.groups[saved.parameters[name].group].kind
            if kind != other:
                raise CheckpointError(
                    f"the checkpoint holds the state of {other} for {name!r}, and the pipe trains "
                    f"it with {kind}; give compile() the optimizer that it was made with"
                )


class Restoring:
    """A saved state on its way into optimizers: checked when it is made, then put."""

    def __init__(self, saved: OptimizerState, optimizers: Optimizers, names: Names) -> None:
        """Check that it fits.

        Raises:
            CheckpointError: an optimizer is of another kind, holds other parameters, or has in
                one group what had different settings.
        """
        check_kinds(saved, optimizers, names)
        held = {names[p] for _, _, group in _groups(optimizers) for p in group["params"]}
        missing = next((name for name in saved.parameters if name not in held), None)
        if missing is not None:
            raise CheckpointError(
                f"the checkpoint holds the state of an optimizer for {missing!r}, and none of the "
                "pipe's trains it; give compile() the optimizer that it was made with"
            )
        self._groups = [
            (group, _settings(saved, type(optimizer).__qualname__, index, group, names))
            for optimizer, index, group in _groups(optimizers)
        ]
        self._states = [
            (optimizer, p, _placed(saved.parameters[names[p]].state, p, settings))
            for (optimizer, _, group), (_, settings) in zip(
                _groups(optimizers), self._groups, strict=True
            )
            for p in group["params"]
        ]
        self._optimizers = [optimizer for optimizer in optimizers if optimizer is not None]

    def put(self) -> None:
        """Make it the optimizers'."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for optimizer, parameter, state in self._states:
            if state:
                optimizer.state[parameter] = state
        for group, values in self._groups:
            group.update(values)


def _groups(optimizers: Optimizers) -> Iterator[tuple[Optimizer, int, dict[str, Any]]]:
    for optimizer in optimizers:
        if optimizer is not None:
            for index, group in enumerate(optimizer.param_groups):
                yield optimizer, index, group


def _settings(
    saved: OptimizerState, kind: str, index: int, group: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """A group's settings: those that its parameters had; without any, those of its like."""
    held = [names[parameter] for parameter in group["params"]]
    if not held:
        like = (g.settings for g in saved.groups if (g.kind, g.index) == (kind, index))
        return _own(next(like, {}))
    first = saved.groups[saved.parameters[held[0]].group]
    for name in held[1:]:
        other = saved.groups[saved.parameters[name].group]
        key = _differing(first.settings, other.settings)
        if key is not None:
            raise CheckpointError(
                f"{held[0]!r} and {name!r} are in one parameter group here, and had different "
                f"{key!r} in the checkpoint; let the optimizer function part them as then"
            )
    return _own(first.settings)


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy: a learning rate that is a tensor is changed in place, for each group by itself."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in settings.items()}


def _same(one: GroupState, other: GroupState) -> bool:
    alike = (one.kind, one.index) == (other.kind, other.index)
    return alike and _differing(one.settings, other.settings) is None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first setting that differs."""
    for key in (*one, *other):
        if key not in one or key not in other:
            return key
        if isinstance(one[key], Tensor) or isinstance(other[key], Tensor):
            if float(one[key]) != float(other[key]):
                return key
        elif one[key] != other[key]:
            return key
    return None


def _placed(
    state: Mapping[str, Any], parameter: Tensor, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter's state where its optimizer wants it, in the parameter's own layout.

    Counts of steps stay on the CPU, as torch's optimizers make them, unless a kernel on the
    device reads them.
    """
    on_device = settings.get("capturable") or settings.get("fused")

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or (key == "step" and not on_device):
            return value.clone() if isinstance(value, Tensor) else value
        if value.shape != parameter.shape:
            return value.to(parameter.device, copy=True)
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    return {key: place(key, value) for key, value in state.items()}
