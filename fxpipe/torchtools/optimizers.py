"""Copies of an optimizer with other parameter groups, to step in its place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
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
        elif key not in ("param_groups", "state"):
            vars(made)[key] = unshared_items(value)
    made.state = defaultdict(dict)
    return made


def unshared_items(value: Any) -> Any:
    """A copy of tensors, and of what holds them; parameters and other objects are the same."""
    match value:
        case nn.Parameter():
            return value
        case Tensor():
            return value.detach().clone()
        case dict():
            made = value.copy()
            made.update({key: unshared_items(item) for key, item in value.items()})
            return made
        case list():
            return [unshared_items(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(unshared_items(item) for item in value)
        case deque():
            return deque(map(unshared_items, value), value.maxlen)
        case set():
            return set(value)
    return value
