"""Copies of an optimizer with other parameter groups, to step in its place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def twin(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """A copy of an optimizer with these groups and the same state and attributes.

    Step it with ``type(optimizer).step``, as the attribute ``step`` may be a scheduler's wrapper.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer))
    made.__dict__.pop("step", None)
    made.param_groups = list(groups)
    return made


def alone(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """The same with a state of its own, which is empty, with copies of what a step may change in
    place, and without hooks."""
    made = twin(optimizer, groups)
    for key, value in [*vars(made).items()]:
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            vars(made)[key] = OrderedDict()
        elif isinstance(value, Tensor | list | dict) and key != "param_groups":
            vars(made)[key] = value.clone() if isinstance(value, Tensor) else value.copy()
    made.state = defaultdict(dict)
    return made
