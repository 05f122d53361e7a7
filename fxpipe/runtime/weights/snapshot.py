"""An optimizer as it was, to be put back exactly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerSnapshot:
    """A copy of an optimizer's state, of its groups' settings, and of its own plain attributes.

    The optimizer's own ``load_state_dict`` would not put it back: it casts the state to the types
    of the parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: copied(state) for key, state in optimizer.state.items()}
        self._groups = [(group, copied(settings(group))) for group in optimizer.param_groups]
        self._attributes = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in vars(optimizer).items()
            if value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor)
        }

    def put_back(self) -> None:
        """Make it so again."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, values in self._groups:
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            group.update(values)
        vars(self._optimizer).update(self._attributes)


def twin(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """An optimizer with groups of its own, and the same state and attributes.

    ``type(optimizer).step`` steps it: the optimizer's own may be a scheduler's wrapper.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer))
    made.__dict__.pop("step", None)
    made.param_groups = list(groups)
    return made


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """The same, which a change in place leaves alone: a learning rate may be a tensor."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in settings(group).items()
    }


def copied(values: Any) -> Any:
    """A copy of the state of one parameter or group, which is a dictionary as a rule."""
    if not isinstance(values, dict):
        return copy.deepcopy(values)
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }
